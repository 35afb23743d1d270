"""How long a commit takes from its rename to every answer, and what commits cost the calls beside them: both servers.

Per server, with client, publisher and server on the same CPUs:

* *visible*: commits of ``--rows`` rows come, one each ``--every-s`` seconds, while one call after the other is sent; the time
  from the rename of a commit's file to the first answer that names it is told as p50 and p99;
* *latency*: an open loop at ``--share`` of what a closed one reaches (Poisson; latency counts from when a call was due), in
  phases: without commits, with them, without, ...; told are the median p99 of the phases of either kind and their ratio.

The commits are those of `tessera.serving.bench.commits`, made by a process of its own.

    python -m tessera.serving.bench.freshness --folder DIR [--gigabytes 0.1] [--rows 10000] [--phases 4] [--phase-s 10]

The sizes that are aimed at: ``--gigabytes 4 --rows 100000 --phases 4 --phase-s 300 --share 0.5``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tessera.serving.bench.commits import SyntheticPublisher
from tessera.serving.bench.processes import LOADER, METHOD, Load, tessera_load
from tessera.serving.bench.reload_servers import MODEL, make_versions
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, machine, print_head, print_row

PROGRAMS = {
    "cpp": (str(LOADER.with_name("tessera-server")),),
    "python": (sys.executable, "-m", "tessera", "serve"),
}
CONNECTIONS = 4
IN_FLIGHT = 16
_SEEN_S = 120.0


def publish(orders: Connection, folder: Path, rows: int, every_s: float) -> None:
    """A process that publishes commits from one order (True) until the next (False); None ends it."""
    publisher = SyntheticPublisher(folder)
    orders.send(0)
    while orders.recv() is not None:
        number, due = 0, time.monotonic()
        while not orders.poll(max(0.0, due - time.monotonic())):
            path = publisher.publish(rows=rows, newest_example_s=time.time())
            number, due = int(path.name.partition(".")[0]), due + every_s
        orders.recv()
        orders.send(number)


class Publisher:
    """Publishes in a process of its own while it is asked to."""

    def __init__(self, folder: Path, rows: int, every_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self._process = context.Process(target=publish, args=(theirs, folder, rows, every_s))
        self._process.start()
        self._orders.recv()
        self.last = 0

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Commits come inside the block; ``last`` is the number of the last one behind it."""
        self._orders.send(True)
        try:
            yield
        finally:
            self._orders.send(False)
            self.last = self._orders.recv() or self.last

    def close(self) -> None:
        """End the process."""
        self._orders.send(None)
        self._process.join()


class Watcher:
    """Sends one call after the other, and notes when each commit was answered with first."""

    def __init__(self, address: str, request: bytes) -> None:
        self.seen: dict[int, float] = {}
        self._end = threading.Event()
        self._channel = grpc.insecure_channel(address)
        self._call = self._channel.unary_unary(METHOD, None, pb.PredictionResponse.FromString)
        self._request = request
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            self.seen.setdefault(self._call(self._request).model_commit, time.time())

    def close(self) -> None:
        """Send nothing any more."""
        self._end.set()
        self._thread.join()
        self._channel.close()


def seconds_to_visible(log: Path, seen: Mapping[int, float]) -> list[float]:
    """Tell how long each commit that an answer has named took since its file was renamed; two may come at once."""
    renamed = {number: (log / commit_name(number)).stat().st_ctime for number in seen if number}
    return [seen[number] - renamed[number] for number in renamed]


def measure(program: Sequence[str], package: Path, folder: Path, options: Any) -> dict[str, float]:
    """One server's figures: times in seconds to visible, and of calls in milliseconds."""
    version = folder / "repository" / MODEL / "1"
    shutil.rmtree(folder / "repository", ignore_errors=True)
    version.mkdir(parents=True)
    os.link(package, version / "model.pt")
    request = encode_request(
        RequestDrawer(read_schema(package), Draw(ids="uniform"), seed=1).samples(1)
    )
    cores = sorted(os.sched_getaffinity(0))
    flags = ["--model-repository", str(folder / "repository"), "--follow"]
    p99: dict[bool, list[float]] = {False: [], True: []}
    with ExitStack() as stack:
        publisher = Publisher(version, options.rows, options.every_s)
        stack.callback(publisher.close)
        server = stack.enter_context(ServerProcess(flags, program))
        address = f"127.0.0.1:{server.port}"
        watcher = Watcher(address, request)
        with publisher.publishing():
            time.sleep(options.phase_s)
        until = time.monotonic() + _SEEN_S
        while publisher.last not in watcher.seen and time.monotonic() < until:
            time.sleep(0.01)
        watcher.close()
        visible = seconds_to_visible(version / LOG_FOLDER, watcher.seen)
        closed = Load(in_flight=IN_FLIGHT, connections=CONNECTIONS)
        capacity = tessera_load(package, cores, address, closed, min(10.0, options.phase_s))["rate"]
        rate = options.share * capacity
        opened = Load(in_flight=IN_FLIGHT, connections=CONNECTIONS, rate=rate)
        failed = 0.0
        for number in range(options.phases):
            with ExitStack() as phase:
                if number % 2:
                    phase.enter_context(publisher.publishing())
                found = tessera_load(package, cores, address, opened, options.phase_s)
            p99[bool(number % 2)].append(found["p99_ms"])
            failed += found["failed"]
    without, beside = (statistics.median(p99[kind]) for kind in (False, True))
    return {
        "commits_seen": len(visible),
        "visible_p50_s": float(np.quantile(visible, 0.5)),
        "visible_p99_s": float(np.quantile(visible, 0.99)),
        "rate": rate,
        "without_p99_ms": without,
        "beside_p99_ms": beside,
        "ratio": beside / without,
        "failed": failed,
    }


def main() -> None:
    """Make the package, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where the package is kept")
    parser.add_argument("--gigabytes", type=float, default=0.1, help="of it (default 0.1)")
    parser.add_argument("--rows", type=int, default=10_000, help="of a commit (default 10000)")
    parser.add_argument("--every-s", type=float, default=1.0, help="between commits (default 1)")
    parser.add_argument("--servers", default="cpp,python", help="by commas (default cpp,python)")
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity (default 0.5)")
    parser.add_argument("--phases", type=int, default=4, help="of both kinds (default 4)")
    parser.add_argument("--phase-s", type=float, default=10.0, help="seconds each (default 10)")
    parser.add_argument("--cpus", default="0,1", help="of all together (default 0,1)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    os.sched_setaffinity(0, {int(cpu) for cpu in args.cpus.split(",")})
    args.folder.mkdir(parents=True, exist_ok=True)
    package, _ = make_versions(args.folder, args.gigabytes)
    print(f"{machine()} at the start; a package of {package.stat().st_size >> 20} MiB")
    print_head(
        *("server", "commits", "visible p50 / p99 s", "calls/s", "p99 ms without", "with commits"),
        *("ratio", "failed"),
    )
    results = {}
    for name in args.servers.split(","):
        found = results[name] = measure(PROGRAMS[name], package, args.folder, args)
        print_row(
            *(name, found["commits_seen"]),
            f"{found['visible_p50_s']:.3f} / {found['visible_p99_s']:.3f}",
            *(f"{found['rate']:.0f}", f"{found['without_p99_ms']:.2f}"),
            *(f"{found['beside_p99_ms']:.2f}", f"{found['ratio']:.2f}", f"{found['failed']:.0f}"),
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
