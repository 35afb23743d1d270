"""What messages of a size cost through TCP and through a Unix socket: requests/s, and CPU time of a request.

``python cpp_server/bench/message_ways.py --model-file MODEL.pt`` starts one tessera-server with both, and sends it the
same closed loop of ``tessera-load`` in turn through each, ``--rounds`` times, with each number of ``--ids-per-bag``: more
ids, longer messages.  It prints medians, and the smallest and the largest ratio.  What a message costs on its way is in the
system's time, which the copies, TCP's packets and wake-ups are; that of the server's own code is the model above all.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.serving.client import read_schema

BUILD = Path(__file__).resolve().parents[2] / "build/cpp/release"
WARM_UP_S = 0.5
FIGURES = ("requests/s", "server's own us", "server's system us", "client's system us")
"""Requests a second, and CPU microseconds of a request."""


@contextmanager
def server(args: argparse.Namespace, socket: str) -> Iterator[tuple[int, str]]:
    """Its process id and TCP address."""
    process = subprocess.Popen(
        [
            *(str(args.build / "tessera-server"), "--model", args.model_file, "--port", "0"),
            *("--http-port", "0", "--grpc-socket", socket, "--drain-propagation-ms", "0"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if '"event":"ready"' in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield process.pid, f"127.0.0.1:{json.loads(line)['port']}"
                return
        sys.exit("the server ended before it was ready; start it by hand to see why")
    finally:
        process.terminate()
        process.wait()


def server_s(pid: int) -> tuple[float, float]:
    """CPU seconds of the process in its own code, and in the system for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def turn(args: argparse.Namespace, ids: str, address: str, pid: int) -> tuple[float, ...]:
    """The figures of `FIGURES`, CPU times with the warm-up."""
    before = (*server_s(pid), resource.getrusage(resource.RUSAGE_CHILDREN).ru_stime)
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        subprocess.run(
            [
                *(args.build / "tessera-load", "--address", address, "--csv", file.name),
                *("--model-file", args.model_file, "--samples", str(args.samples)),
                *("--ids-per-bag", ids, "--int32-ids", "--in-flight", str(args.in_flight)),
                *("--connections", str(args.connections), "--warm-up-s", str(WARM_UP_S)),
                *("--duration-s", str(args.seconds)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (row,) = csv.DictReader(Path(file.name).read_text().splitlines())
    rate = float(row["requests_per_second"])
    sent = rate * (args.seconds + WARM_UP_S)
    after = (*server_s(pid), resource.getrusage(resource.RUSAGE_CHILDREN).ru_stime)
    return rate, *(1e6 * (end - begin) / sent for begin, end in zip(before, after, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model-file", required=True, help="a package")
    parser.add_argument("--samples", type=int, default=256, help="samples of a request")
    parser.add_argument("--ids-per-bag", default="1,8,40", help="in turn, for all features")
    parser.add_argument("--in-flight", type=int, default=8, help="requests")
    parser.add_argument("--connections", type=int, default=2, help="of the client")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--build", type=Path, default=BUILD, help="where the programs are")
    args = parser.parse_args()
    schema = read_schema(args.model_file)
    print("ids/bag  message kB  way          " + "".join(f"{name:>20}" for name in FIGURES))
    with (
        tempfile.TemporaryDirectory() as folder,
        server(args, f"{folder}/grpc") as (pid, tcp),
    ):
        ways = {"TCP": tcp, "Unix socket": f"unix:{folder}/grpc"}
        for ids in args.ids_per_bag.split(","):
            of_bags = len(schema.group("id_list")) * (int(ids) + 1)  # ids and a length, int32 each
            size = 4 * args.samples * (of_bags + len(schema.dense_features))
            turns = [
                {way: turn(args, ids, address, pid) for way, address in ways.items()}
                for _ in range(args.rounds)
            ]
            for way in ways:
                medians = [
                    statistics.median(of_turn[way][i] for of_turn in turns)
                    for i in range(len(FIGURES))
                ]
                cells = "".join(f"{figure:20.0f}" for figure in medians)
                print(f"{ids:>7} {size / 1e3:11.0f}  {way:12} {cells}")
            for i, name in enumerate(FIGURES):
                ratios = sorted(each["Unix socket"][i] / each["TCP"][i] for each in turns)
                print(
                    f"{'':21}{name}, Unix socket / TCP: {statistics.median(ratios):.2f} "
                    f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
