"""Requests per second and latency of ``tessera serve --processes N`` beside one process.

Servers of the same package, one for each number of processes, take turns, so that whatever else the machine
does falls on all of them.  Every server may use the same half of the machine's CPUs and the client the other
half, where there are at least four; on fewer they share them, and the ratio says little.

Closed loop: a fixed number of calls is always in flight.  Open loop: calls are sent at random times at a rate that
is a share of what one process answered in the closed loop, times the processes; latency counts from when a
call was due.  A connection belongs to one process, so there are many.

The client is ``tessera-load`` where that was built and starts, otherwise asyncio clients in processes of their own.
The package: 13 dense features, 26 int8 tables of D=64, MLP 13-512-256-64, dot interaction, MLP 512-256-1, random
weights; one sample a request, one id a bag.  Figures are medians over the rounds; "CPU" is what all processes
of the server spent per request, "ratio" the median of the ratios to one process's requests per second in the
same round, with the smallest and the largest.

    python -m tessera.serving.bench.processes [--processes 2,4] [--seconds 5] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import grpc.aio
import numpy as np

from tessera.serving.bench.forward import dlrm
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import arguments, in_turns, machine, print_head, print_row

METHOD = "/predictor.Predictor/Predict"
LOADER = Path(__file__).resolve().parents[2] / "build/cpp/release/tessera-load"
WARM_UP_S = 0.5
DISTINCT = 256
OPEN_SHARE = 0.7
"""What the open loop sends of what one process answered in the closed loop, for each process."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the client sends; ``rate`` 0 is a closed loop with ``in_flight`` calls over all connections."""

    in_flight: int
    connections: int
    rate: float = 0.0

    def __str__(self) -> str:
        if self.rate:
            return f"open loop, {self.rate:.0f}/s"
        return f"closed loop, {self.in_flight} in flight"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One turn of one server; ``cpu_us`` is the CPU time of all its processes per request."""

    rate: float
    p50_ms: float
    p99_ms: float
    failed: int
    cpu_us: float


Client = Callable[[str, Load, float], dict[str, float]]
"""Sends a load to an address for some seconds; returns ``answered``, ``failed``, ``rate``, ``p50_ms``, ``p99_ms``."""


# The client that was built.


def tessera_load(
    package: Path, cores: Sequence[int], address: str, load: Load, seconds: float
) -> dict[str, float]:
    """One run of ``tessera-load`` on ``cores``."""
    loop = ("--rate", load.rate) if load.rate else ("--in-flight", load.in_flight)
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        command = [
            *(LOADER, "--address", address, "--model-file", package, *loop),
            *("--connections", load.connections, "--duration-s", seconds),
            *("--warm-up-s", WARM_UP_S, "--csv", file.name),
        ]
        # Status 1 says that some calls failed, which the figures tell as well.
        done = subprocess.run(
            list(map(str, command)),
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
            check=False,
        )
        if done.returncode not in {0, 1}:
            sys.exit(f"{LOADER} ended with exit status {done.returncode}")
        (row,) = csv.DictReader(Path(file.name).read_text(encoding="utf-8").splitlines())
    return {
        "answered": float(row["answered"]),
        "failed": float(row["failed"]),
        "rate": float(row["requests_per_second"]),
        "p50_ms": float(row["p50_ms"]),
        "p99_ms": float(row["p99_ms"]),
    }


def _loader_starts() -> bool:
    try:
        return not subprocess.run([LOADER, "--help"], capture_output=True, check=False).returncode
    except OSError:
        return False


# The client in Python.


class _Caller:
    """One process's part of a load: the latencies of its calls in seconds, and how many failed."""

    def __init__(self, contents: list[bytes], load: Load, seconds: float) -> None:
        self.latencies: list[float] = []
        self.failed = 0
        self._contents = contents
        self._load = load
        self._begin = time.perf_counter() + WARM_UP_S
        self._end = self._begin + seconds
        self._turn = 0

    async def run(self, address: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with contextlib.AsyncExitStack() as stack:
            calls = []
            for _ in range(self._load.connections):
                channel = grpc.aio.insecure_channel(address, options=options)
                await stack.enter_async_context(channel)
                await channel.channel_ready()
                calls.append(channel.unary_unary(METHOD, None, None))
            if self._load.rate:
                await self._open_loop(calls)
            else:
                numbers = range(self._load.in_flight)
                await asyncio.gather(*(self._closed_loop(calls[n % len(calls)]) for n in numbers))

    async def _one(self, call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes], due: float) -> None:
        self._turn += 1
        try:
            await call(self._contents[self._turn % len(self._contents)], timeout=10.0)
        except grpc.RpcError:
            self.failed += 1
            return
        if due >= self._begin:
            self.latencies.append(time.perf_counter() - due)

    async def _closed_loop(self, call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> None:
        while (now := time.perf_counter()) < self._end:
            await self._one(call, now)

    async def _open_loop(self, calls: list[grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]]) -> None:
        draw = np.random.default_rng()
        started: set[asyncio.Task[None]] = set()
        due = time.perf_counter()
        while (due := due + draw.exponential(1 / self._load.rate)) < self._end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.ensure_future(self._one(calls[draw.integers(len(calls))], due))
            started.add(task)
            task.add_done_callback(started.discard)
        await asyncio.gather(*started)


def _calling(orders: Connection, contents: list[bytes], cores: Sequence[int]) -> None:
    """A client process: sends each load that it is told until it is told None."""
    os.sched_setaffinity(0, cores)
    while (order := orders.recv()) is not None:
        address, load, seconds = order
        caller = _Caller(contents, load, seconds)
        asyncio.run(caller.run(address))
        orders.send((caller.latencies, caller.failed))


class PythonClients:
    """Client processes, one for each of ``cores``, that share each load.

    Args:
        contents: encoded requests.
        cores: the CPUs that they may use.
    """

    def __init__(self, contents: list[bytes], cores: Sequence[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for _ in cores:
            ours, theirs = context.Pipe()
            context.Process(target=_calling, args=(theirs, contents, cores), daemon=True).start()
            self._pipes.append(ours)

    def __enter__(self) -> PythonClients:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def __call__(self, address: str, load: Load, seconds: float) -> dict[str, float]:
        """Send ``load``; see `Client`."""
        count = len(self._pipes)
        share = Load(
            in_flight=max(1, load.in_flight // count),
            connections=max(1, load.connections // count),
            rate=load.rate / count,
        )
        for pipe in self._pipes:
            pipe.send((address, share, seconds))
        told = [pipe.recv() for pipe in self._pipes]
        latencies = np.concatenate([np.asarray(own) for own, _ in told])
        p50, p99 = np.quantile(latencies, [0.5, 0.99]) * 1e3
        return {
            "answered": float(len(latencies)),
            "failed": float(sum(failed for _, failed in told)),
            "rate": len(latencies) / seconds,
            "p50_ms": float(p50),
            "p99_ms": float(p99),
        }


# The servers.


def halves() -> tuple[list[int], list[int]]:
    """The CPUs of the servers and those of the client: the same ones where there are fewer than four."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 4:
        return cores, cores
    # Neighbours may be two threads of one core: each half has whole ones.
    return cores[: len(cores) // 2], cores[len(cores) // 2 :]


@contextlib.contextmanager
def serving(package: Path, processes: int, cores: Sequence[int]) -> Iterator[ServerProcess]:
    """A server of ``processes`` processes on ``cores``."""
    program = [
        *("taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "tessera", "serve"),
    ]
    flags = ["--model", str(package), "--processes", str(processes)]
    with ServerProcess(flags, program) as server:
        yield server


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of those that it started and that are there."""
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = entry.read_text(encoding="utf-8").rpartition(")")[2].split()
            number = int(entry.parent.name)
            parents[number], ticks[number] = int(fields[1]), int(fields[11]) + int(fields[12])
    own = sum(ticks[number] for number in ticks if pid in {number, parents[number]})
    return own / os.sysconf("SC_CLK_TCK")


def measure(server: ServerProcess, client: Client, load: Load, seconds: float) -> Measurement:
    """One turn of ``server``."""
    before = cpu_seconds(server.process.pid)
    found = client(server.address, load, seconds)
    # The warm-up is in the CPU as well.
    used = (cpu_seconds(server.process.pid) - before) * seconds / (seconds + WARM_UP_S)
    return Measurement(
        rate=found["rate"],
        p50_ms=found["p50_ms"],
        p99_ms=found["p99_ms"],
        failed=int(found["failed"]),
        cpu_us=1e6 * used / max(found["answered"], 1),
    )


def show(
    load: str, processes: int, turns: list[Measurement], one: list[Measurement]
) -> dict[str, object]:
    """Print a row; returns its figures."""
    ratios = [own.rate / other.rate for own, other in zip(turns, one, strict=True)]
    middle = {
        name: statistics.median(getattr(turn, name) for turn in turns)
        for name in ("rate", "p50_ms", "p99_ms", "cpu_us")
    }
    failed = sum(turn.failed for turn in turns)
    print_row(
        *(load, processes, f"{middle['rate']:.0f}", f"{middle['p50_ms']:.2f}"),
        *(f"{middle['p99_ms']:.2f}", f"{middle['cpu_us']:.0f}", failed),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    )
    return {
        "load": load,
        "processes": processes,
        "ratios": ratios,
        "turns": [asdict(t) for t in turns],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--processes", default="2", help="numbers of processes beside 1, by commas (default 2)"
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default 100000)")
    parser.add_argument("--in-flight", type=int, default=64, help="in the closed loop (default 64)")
    parser.add_argument("--connections", type=int, default=32, help="of the client (default 32)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each server (default 5)")
    parser.add_argument(
        "--python-client",
        action="store_true",
        help="do not use tessera-load (default: if it starts)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    server_cores, client_cores = halves()
    built = not args.python_client and _loader_starts()
    print(
        f"{machine()} at the start; medians of {args.rounds} rounds of {args.seconds} s; servers on CPUs "
        f"{server_cores}, client ({'tessera-load' if built else 'asyncio'}) on {client_cores}"
    )
    counts = [1, *map(int, args.processes.split(","))]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        package = Path(folder) / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        client: Client
        if built:
            client = partial(tessera_load, package, client_cores)
        else:
            drawer = RequestDrawer(read_schema(package), Draw(ids="uniform", bags="one"), seed=0)
            contents = [encode_request(drawer.samples(1)) for _ in range(DISTINCT)]
            client = stack.enter_context(PythonClients(contents, client_cores))
        servers = {
            count: stack.enter_context(serving(package, count, server_cores)) for count in counts
        }
        closed = Load(in_flight=args.in_flight, connections=args.connections)
        print_head(
            "load", "processes", "requests/s", "p50 ms", "p99 ms", "CPU us", "failed", "ratio"
        )
        turns = in_turns(
            {
                str(count): partial(measure, server, client, closed, args.seconds)
                for count, server in servers.items()
            },
            args.rounds,
        )
        rows += [show(str(closed), count, turns[str(count)], turns["1"]) for count in counts]
        one = statistics.median(turn.rate for turn in turns["1"])
        opened = {
            count: Load(in_flight=0, connections=args.connections, rate=OPEN_SHARE * count * one)
            for count in counts
        }
        turns = in_turns(
            {
                str(count): partial(measure, server, client, opened[count], args.seconds)
                for count, server in servers.items()
            },
            args.rounds,
        )
        rows += [show(str(opened[count]), count, turns[str(count)], turns["1"]) for count in counts]
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
