"""The C++ server on GPUs: rising open-loop rates against the same package in-process.

    python cpp_server/bench/gpu_bench.py --package MODEL.pt [--ids-per-bag 3,2,1,...]

The package is one that ``package-model --device cuda`` wrote (``mlperf_package.py`` beside this
script makes one of MLPerf's DLRM-DCNv2 shape with capped tables).  First `in_process` times forward
passes with their copies, one session and two; then `tessera-server` is started, and `tessera-load` on
the same machine sends requests of ``--samples`` samples at shares of the best in-process rate.
All on one GPU, the first unless CUDA_VISIBLE_DEVICES names another; ``gpu_copies.py`` is for several.
Python's standard library is all that it needs, so that it runs on a GPU host as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BATCH_SIZES = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
WARM_UP_S = 0.5
SHARES = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)


def in_process(args: argparse.Namespace, sessions: int) -> dict[int, list[float]]:
    """By batch size: median us, p99 us, samples/s."""
    done = subprocess.run(
        [
            *(args.build / "in_process", args.package, args.ids_per_bag, str(args.seconds / 3)),
            *(str(sessions), *map(str, BATCH_SIZES)),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows = [line.split(",") for line in done.stdout.splitlines()]
    return {int(row[0]): [float(cell) for cell in row[2:]] for row in rows}


@contextlib.contextmanager
def server(args: argparse.Namespace, *flags: str) -> Iterator[tuple[int, int]]:
    """A running server's gRPC and HTTP ports."""
    process = subprocess.Popen(
        [
            *(args.build / "tessera-server", "--model", args.package, "--host", "127.0.0.1"),
            *("--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"),
            *("--max-batch-samples", str(args.max_batch), "--max-batch-ids", "16000000"),
            *("--workers", str(args.workers), *flags),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    begin = time.perf_counter()
    try:
        for line in process.stderr:
            if '"event":"ready"' not in line:
                print("server:", line.strip())
                continue
            entry = json.loads(line)
            print(f"ready after {time.perf_counter() - begin:.2f} s")
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield int(entry["port"]), int(entry["http_port"])
            break
        else:
            sys.exit("the server ended before it was ready")
    finally:
        process.terminate()
        process.wait()


def load(
    args: argparse.Namespace, where: int | str, *flags: str, what: Sequence[str] = ()
) -> dict[str, float]:
    """One run of tessera-load at a port of this machine or at an address.

    ``what`` it sends takes the place of requests that it draws for the package.
    """
    address = where if isinstance(where, str) else f"127.0.0.1:{where}"
    drawn = ("--model-file", args.package, "--ids-per-bag", args.ids_per_bag, "--int32-ids")
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        subprocess.run(
            [
                *(args.build / "tessera-load", "--address", address),
                *(what or drawn),
                *("--duration-s", str(args.seconds), "--warm-up-s", str(WARM_UP_S)),
                *("--csv", file.name),
                *flags,
            ],
            check=False,  # 1: some requests were refused, which the table shows
            stdout=subprocess.DEVNULL,
        )
        (row,) = csv.DictReader(Path(file.name).read_text().splitlines())
    return {name: float(value) for name, value in row.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that are also those of ``gpu_copies.py``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", required=True, help="made with --device cuda")
    parser.add_argument(
        "--ids-per-bag",
        default="1",
        help="for all features, or one for each (default: %(default)s)",
    )
    parser.add_argument(
        "--samples", type=int, default=256, help="samples of a request (default: %(default)s)"
    )
    parser.add_argument(
        "--max-batch", type=int, default=2048, help="samples of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=2, help="the server's, for each GPU (default: %(default)s)"
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=4,
        help="the client's, with a thread each (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        help="length of a step, seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--build",
        type=Path,
        default=REPOSITORY / "build/cpp/release",
        help="where the programs are (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def main() -> None:
    args = parser(__doc__).parse_args()
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    figures: dict[str, object] = {}
    best = 0.0
    for sessions in (1, 2):
        rows = in_process(args, sessions)
        figures[f"in_process_{sessions}"] = rows
        print(f"in-process, {sessions} sessions:  B, us, p99 us, samples/s")
        for size, (median, p99, rate) in rows.items():
            print(f"  {size:6} {median:10.1f} {p99:10.1f} {rate:12.0f}")
            best = max(best, rate)
    steps = []
    with server(args) as (port, http_port):
        row = load(args, port, "--samples", "1", "--in-flight", "64", "--connections", "4")
        print(f"one-sample requests, 64 in flight: {row}")
        figures["one_sample"] = row
        print("offered/best  samples/s   /best   ok  p50 ms  p99 ms  batch  forward us")
        for share in SHARES:
            rate = share * best / args.samples
            row = load(
                *(args, port, "--samples", str(args.samples), "--rate", f"{rate:.1f}"),
                *("--connections", str(args.connections)),
            )
            got = row["requests_per_second"] * args.samples
            answered = row["answered"] / max(rate * args.seconds, 1)
            steps.append({"share": share, **row})
            print(
                f"{share:12.2f} {got:10.0f} {got / best:7.2f} {answered:4.2f} {row['p50_ms']:7.2f} "
                f"{row['p99_ms']:7.2f} {row['batch_samples']:6.0f} {row['forward_us']:8.0f}",
                flush=True,
            )
        url = f"http://127.0.0.1:{http_port}/metrics"
        with urllib.request.urlopen(url) as reply:
            page = reply.read().decode()
    for line in page.splitlines():
        wanted = ("tessera_device_memory_bytes{", "process_resident", "tessera_stage_duration_sec")
        if line.startswith(wanted) and "_bucket" not in line:
            print(line)
    figures["steps"] = steps
    figures["best_in_process"] = best
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
