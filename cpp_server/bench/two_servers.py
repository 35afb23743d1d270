"""Two builds of tessera-server beside each other: requests/s, p99 and the server's CPU time a request, by h2load.

``python cpp_server/bench/two_servers.py --old PROGRAM --model-file MODEL.pt`` compares this checkout's build with another
one.  The servers take turns on the cores that are named, each started anew for each turn, and h2load (Debian:
nghttp2-client) sends the same request again and again.  It prints medians, and of the ratios the smallest and
the largest.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tessera.serving.client import Draw, RequestDrawer, encode_request
from tessera.serving.package.loading import load_package

PROGRAM = Path(__file__).resolve().parents[2] / "build/cpp/release/tessera-server"
PORT = 50_951
START_S = 60.0
PATH = "/predictor.Predictor/Predict"
HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")
CASES = ((1, 1, 1), (8, 1, 1), (32, 1, 1), (64, 1, 1), (64, 8, 1), (8, 1, 100), (32, 1, 100))
"""Requests in flight, connections, samples a request."""


def case_of(text: str) -> tuple[int, int, int]:
    """A case from ``IN_FLIGHT,CONNECTIONS,SAMPLES``."""
    try:
        in_flight, connections, samples = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not IN_FLIGHT,CONNECTIONS,SAMPLES, such as 512,48,1"
        ) from None
    if min(connections, samples) < 1 or in_flight < connections or in_flight % connections:
        raise argparse.ArgumentTypeError(f"{text!r}: IN_FLIGHT must be a multiple of CONNECTIONS")
    return in_flight, connections, samples


@dataclasses.dataclass(frozen=True)
class Turn:
    """One server's turn: requests a second, their p99 in ms, the server's CPU time a request in us."""

    rate: float
    p99_ms: float
    cpu_us: float


def cpu_s(pid: int) -> float:
    """CPU seconds that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1}/readyz", timeout=1):
            return True
    except OSError:
        return False


def start(program: Path, model: Path, cores: str) -> subprocess.Popen[bytes]:
    """A server that is ready."""
    process = subprocess.Popen(
        [
            *("taskset", "-c", cores, str(program), "--model", str(model), "--host", "127.0.0.1"),
            *("--port", str(PORT), "--http-port", str(PORT + 1)),
        ],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        if is_ready():
            return process
        time.sleep(0.05)
    process.kill()
    raise SystemExit(f"{program} did not become ready; start it by hand to see why")


def load(
    given: argparse.Namespace, in_flight: int, connections: int, request: Path, count: int
) -> Turn:
    """``count`` requests by h2load; the CPU time is filled in by `turn`."""
    threads = min(given.client_threads, connections)
    with tempfile.NamedTemporaryFile() as log:
        output = subprocess.run(
            [
                *("taskset", "-c", given.client_cores, "h2load", f"--log-file={log.name}"),
                *("-n", str(count), "-t", str(threads), "-c", str(connections)),
                *("-m", str(in_flight // connections), "-d", str(request)),
                *(*HEADERS, f"http://127.0.0.1:{PORT}{PATH}"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        took_us = sorted(int(line.split()[2]) for line in Path(log.name).read_text().splitlines())
    rate, succeeded = re.search(r"([\d.]+) req/s", output), re.search(r"(\d+) succeeded", output)
    if rate is None or succeeded is None or int(succeeded[1]) != count:
        raise SystemExit(f"h2load did not get {count} answers:\n{output}")
    return Turn(float(rate[1]), took_us[int(0.99 * count)] / 1e3, 0.0)


def turn(
    program: Path, given: argparse.Namespace, case: tuple[int, int], request: Path, count: int
) -> Turn:
    """One server's turn, after a tenth of the requests to warm up."""
    process = start(program, given.model_file, given.server_cores)
    try:
        load(given, *case, request, max(count // 10, 100))
        before = cpu_s(process.pid)
        seen = load(given, *case, request, count)
        cpu_us = 1e6 * (cpu_s(process.pid) - before) / count
        return dataclasses.replace(seen, cpu_us=cpu_us)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--old", type=Path, required=True, help="the other build's tessera-server")
    parser.add_argument("--new", type=Path, default=PROGRAM, help="this build's")
    parser.add_argument("--model-file", type=Path, required=True, help="a package both can load")
    parser.add_argument("--server-cores", default="0,1", help="cores of the server, for taskset")
    parser.add_argument("--client-cores", default="0,1", help="cores of h2load")
    parser.add_argument("--client-threads", type=int, default=1, help="threads of h2load")
    parser.add_argument(
        "--case",
        type=case_of,
        action="append",
        help="IN_FLIGHT,CONNECTIONS,SAMPLES; may be repeated (default: seven cases)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each server in each case")
    parser.add_argument(
        "--requests", type=int, default=40_000, help="requests of one sample a turn"
    )
    return parser.parse_args()


def main() -> int:
    given = parse()
    drawer = RequestDrawer(
        load_package(given.model_file).manifest.schema,
        Draw(ids="uniform", bags="uniform", max_bag=1),
        seed=0,
    )
    programs = {"old": given.old, "new": given.new}
    with tempfile.TemporaryDirectory() as folder:
        for in_flight, connections, samples in given.case or CASES:
            content = encode_request(drawer.samples(samples))
            request = Path(folder) / "request"
            request.write_bytes(b"\0" + len(content).to_bytes(4, "big") + content)
            count = max(given.requests // (1 if samples == 1 else 8), 100)
            turns: dict[str, list[Turn]] = {"old": [], "new": []}
            for number in range(given.rounds):
                for name in sorted(programs, reverse=bool(number % 2)):
                    case = (in_flight, connections)
                    turns[name].append(turn(programs[name], given, case, request, count))
            ratios = [b.rate / a.rate for a, b in zip(turns["old"], turns["new"], strict=True)]
            cells = [f"{samples} samples, {in_flight} in flight, {connections} connections"]
            for name, seen in turns.items():
                rate, p99, cpu = (
                    statistics.median(getattr(one, field) for one in seen)
                    for field in ("rate", "p99_ms", "cpu_us")
                )
                cells.append(f"{name} {rate:,.0f}/s, p99 {p99:.2f} ms, CPU {cpu:.1f} us")
            middle = statistics.median(ratios)
            cells.append(f"{middle:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})")
            print(" | ".join(cells), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
