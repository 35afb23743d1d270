"""Where a one-sample request's CPU time in tessera-server goes, by stage: perf's samples while h2load sends.

``python cpp_server/bench/request_cpu.py --model-file MODEL.pt`` needs perf (Debian: linux-perf) and h2load
(nghttp2-client).  A sample counts for the stage whose functions it was taken in; a stage's time is its share of
the samples, of the server's CPU time a request.  Shares hold on a busy machine too, where stage times by the clock
do not.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package

sys.path.insert(0, str(Path(__file__).parent))
from two_servers import PROGRAM, cpu_s, load, start

STAGES = (
    ("network: the system's reads, writes and wake-ups", r"\[kernel"),
    ("network: HTTP/2 and gRPC's framing", r"libnghttp2|tessera::http2::"),
    (
        "forward: the model's operators",
        r"libtorch|libc10|libtessera_ops|libgomp|libmkl|Runner|Session",
    ),
    (
        "queue and batch: cut, merge, split",
        r"Queue|Schedul|Merger|merge|Executor|cut|drop_reason|total_ids|work",
    ),
    ("encode: the answer", r"response|encode|visit_timings|begin_reply|PredictCall::answer|Writer"),
    (
        "decode: parse, check, admit",
        r"parse|decode|read_|check|join|shared|Request|PredictCall|Wire|wire",
    ),
    ("memory: allocation and copies", r"libc\.so|libstdc\+\+|operator new|operator delete"),
)
"""A stage, and what perf's "object symbol" of its samples matches; the first one that does."""

REST = "clocks, metrics and the rest"


def stage_of(sample: str) -> str:
    """The stage of a sample's "object symbol"."""
    return next((name for name, pattern in STAGES if re.search(pattern, sample)), REST)


def shares(recording: Path) -> dict[str, float]:
    """Each stage's share of a recording's samples."""
    report = subprocess.run(
        [
            *("perf", "report", "-i", str(recording), "--no-children", "-g", "none"),
            *("--sort", "dso,sym", "--percent-limit", "0", "--stdio"),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found: defaultdict[str, float] = defaultdict(float)
    for line in report.splitlines():
        if sample := re.match(r"\s+([\d.]+)%\s+(.+)", line):
            found[stage_of(sample[2])] += float(sample[1])
    total = sum(found.values())
    return {name: value / total for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--program", type=Path, default=PROGRAM, help="a tessera-server")
    parser.add_argument("--model-file", type=Path, required=True, help="a package")
    parser.add_argument("--cores", default="0,1", help="of the server and h2load, for taskset")
    parser.add_argument("--requests", type=int, default=100_000, help="of each row")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 64])
    given = parser.parse_args()
    schema = load_package(given.model_file).manifest.schema
    drawer = RequestDrawer(schema, Draw(ids="uniform", bags="uniform", max_bag=1), seed=0)
    columns: list[tuple[str, float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        content = encode_request(drawer.samples(1))
        request, recording = Path(folder) / "request", Path(folder) / "perf"
        request.write_bytes(b"\0" + len(content).to_bytes(4, "big") + content)
        for in_flight in given.in_flight:
            count = given.requests if in_flight > 1 else given.requests // 10
            server = start(given.program, given.model_file, given.cores)
            try:
                load(given.cores, in_flight, 1, request, max(count // 10, 100))
                before = cpu_s(server.pid)
                load(given.cores, in_flight, 1, request, count)
                cpu_us = 1e6 * (cpu_s(server.pid) - before) / count
                perf = ("perf", "record", "-q", "-F", "4000", "-o", str(recording))
                with subprocess.Popen([*perf, "-p", str(server.pid)]) as process:
                    load(given.cores, in_flight, 1, request, count)
                    process.send_signal(signal.SIGINT)
            finally:
                server.send_signal(signal.SIGTERM)
                server.wait()
            columns.append((f"{in_flight} in flight", cpu_us, shares(recording)))
    lines = [
        "| CPU us a request | " + " | ".join(name for name, _, _ in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for stage in (*(name for name, _ in STAGES), REST):
        cells = " | ".join(f"{cpu * share.get(stage, 0):.1f}" for _, cpu, share in columns)
        lines.append(f"| {stage} | {cells} |")
    lines.append("| in all | " + " | ".join(f"{cpu:.1f}" for _, cpu, _ in columns) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
