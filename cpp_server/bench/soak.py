"""Hours in minutes: a server under load with everything that clients and operators do to it.

    python cpp_server/bench/soak.py --minutes 30 --rate 2000 [--kind cpp|python]

Requests leave at a constant rate whatever the server does.  Some are malformed, some have
deadlines that pass, some are cancelled; every few seconds (``--restart-s``) the server gets
SIGTERM and is started again.  Every answer is compared bit for bit with the package run
in-process.  The run fails (exit status 1) on a wrong answer, on a request that was sent before a
SIGTERM and not answered, on a status that its request cannot have, on an exit status that is not
0, and on memory that grows: from the middle to the last third of a server's life, by more than 5%.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio
import numpy as np
import torch

from tessera.serving.bench.forward import dlrm
from tessera.serving.client import Draw, RequestDrawer, encode_request, read_schema
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.protocol import predictor_pb2 as pb

REPOSITORY = Path(__file__).resolve().parents[2]
CPP_SERVER = REPOSITORY / "build/cpp/release/tessera-server"
# While the server is going, or gone.
REFUSED = {"cpp": {"UNAVAILABLE"}, "python": {"UNAVAILABLE", "CANCELLED"}}
METHOD = "/predictor.Predictor/Predict"
DISTINCT = 64
Call: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
GROWTH = 1.05
WARM_UP_S = 20.0
# What each kind of request may end with while the server is up.
ALLOWED = {
    "good": {"OK"},
    "malformed": {"INVALID_ARGUMENT"},
    "late": {"OK", "DEADLINE_EXCEEDED"},
    "cancelled": {"OK", "CANCELLED"},
}


class Soak:
    """One run; see the module's docstring."""

    def __init__(self, args: argparse.Namespace, package: Path) -> None:
        self.args = args
        self.package = package
        self.requests = make_requests(package)
        self.command = (
            [str(args.server)] if args.kind == "cpp" else [sys.executable, "-m", "tessera", "serve"]
        )
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.down_from = float("inf")  # a request sent later may be refused
        self.random = random.Random(args.seed)  # noqa: S311 - chooses requests, guards nothing
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    async def run(self) -> bool:
        """Whether everything held."""
        end = time.monotonic() + 60 * self.args.minutes
        options = [("grpc.min_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]
        options += [("grpc.initial_reconnect_backoff_ms", 50)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            while time.monotonic() < end and not self.failures:
                await self.one_life(channel, min(self.args.restart_s, end - time.monotonic()))
        for failure in self.failures[:10]:
            print("FAILED:", failure)
        print(dict(self.counts))
        return not self.failures

    async def one_life(self, channel: grpc.aio.Channel, seconds: float) -> None:
        """Start the server, load it, drain it."""
        server = await asyncio.create_subprocess_exec(
            *self.command,
            *("--model", str(self.package), "--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-port", "0", "--drain-propagation-ms", "500", "--log-level", "info"),
            stderr=asyncio.subprocess.PIPE,
        )
        assert server.stderr is not None
        while b'"ready"' not in (line := await server.stderr.readline()):
            if not line:
                raise RuntimeError("the server ended before it was ready")
        reader = asyncio.create_task(drain_pipe(server.stderr))
        # Until the client knows that the server is back, calls fail at once.
        await channel.channel_ready()
        self.down_from = float("inf")
        call: Call = channel.unary_unary(METHOD, bytes, bytes)
        load = asyncio.create_task(self.load(call))
        memory = await watch_memory(server.pid, seconds)
        self.down_from = time.monotonic()
        server.send_signal(signal.SIGTERM)
        status = await server.wait()
        load.cancel()
        await asyncio.gather(load, reader, return_exceptions=True)
        self.counts["lives"] += 1
        if status != 0:
            self.failures.append(f"exit status {status}")
        if grows(memory):
            self.failures.append(f"memory grows: {memory[0]:.0f} to {memory[-1]:.0f} MB")
        if memory:
            print(f"memory {memory[0]:.1f} MB after warm-up, {memory[-1]:.1f} MB at the end")

    async def load(self, call: Call) -> None:
        """Send at the constant rate until cancelled, then wait for what is open."""
        open_calls: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        try:
            while True:
                while due <= time.monotonic():
                    due += 1 / self.args.rate
                    task = asyncio.create_task(self.one_request(call))
                    open_calls.add(task)
                    task.add_done_callback(open_calls.discard)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        finally:
            await asyncio.gather(*open_calls)

    async def one_request(self, call: Call) -> None:
        """Send one request of a random kind and judge how it ends."""
        kind = self.random.choices(tuple(ALLOWED), weights=(90, 3, 4, 3))[0]
        content, expected = self.requests[self.random.randrange(DISTINCT)]
        if kind == "malformed":
            content = content[: self.random.randrange(1, len(content))]
        may_be_refused = time.monotonic() >= self.down_from
        timeout = self.random.uniform(0, 0.003) if kind == "late" else 30.0
        pending = call(content, timeout=timeout)
        if kind == "cancelled":
            asyncio.get_running_loop().call_later(self.random.uniform(0, 0.003), pending.cancel)
        try:
            answer = await pending
            status = "OK"
        except grpc.aio.AioRpcError as error:
            status = error.code().name
        except asyncio.CancelledError:
            status = "CANCELLED"
        self.counts[f"{kind} {status}"] += 1
        if status == "OK":
            scores = pb.PredictionResponse.FromString(answer).predictions["default"].data
            if np.asarray(scores, "<f4").tobytes() != expected:
                self.failures.append(f"a wrong answer to a {kind} request")
        if status not in ALLOWED[kind] and not (
            status in REFUSED[self.args.kind] and may_be_refused
        ):
            self.failures.append(f"a {kind} request ended with {status}")


async def drain_pipe(stream: asyncio.StreamReader) -> None:
    """Read the server's log so that it never waits for us."""
    while await stream.readline():
        pass


def grows(memory: list[float]) -> bool:
    """Whether the last third of a life needs more than the one before it.

    A burst leaves a step, because the allocator keeps what it had at once; a leak goes on.
    """
    third = len(memory) // 3
    if third == 0:
        return False
    middle, last = memory[third : 2 * third], memory[2 * third :]
    return statistics.median(last) > GROWTH * statistics.median(middle)


def resident_megabytes(pid: int) -> float:
    """Resident memory of the process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


async def watch_memory(pid: int, seconds: float) -> list[float]:
    """Resident megabytes, once a second after the warm-up."""
    memory: list[float] = []
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        await asyncio.sleep(1)
        if time.monotonic() > begin + WARM_UP_S:
            memory.append(resident_megabytes(pid))
    return memory


def make_requests(package: Path) -> list[tuple[bytes, bytes]]:
    """Requests of 1 to 8 samples and the bytes of their scores."""
    runner = load_package(package).runner
    drawer = RequestDrawer(read_schema(package), Draw(ids="uniform", max_bag=5), seed=0)
    pairs = []
    for index in range(DISTINCT):
        content = encode_request(drawer.samples(1 + index % 8))
        pairs.append((content, scores_in_process(runner, content)))
    return pairs


def scores_in_process(runner: Runner, content: bytes) -> bytes:
    """The package's own answer."""
    message = pb.PredictionRequest.FromString(content)
    group = message.id_list_features
    dense = torch.from_numpy(np.frombuffer(message.float_features.values, "<f4").copy())
    empty = torch.empty(0, dtype=torch.int32)
    scores = runner.forward(
        HostBatch(
            float_features=dense.view(message.batch_size, -1),
            id_list_features_lengths=torch.from_numpy(np.frombuffer(group.lengths, "<i4").copy()),
            id_list_features_values=torch.from_numpy(
                np.frombuffer(group.values_int64, "<i8").copy()
            ),
            id_score_list_features_lengths=empty,
            id_score_list_features_values=empty.long(),
            id_score_list_features_weights=empty.float(),
            batch_size=message.batch_size,
        )
    )["default"]
    return bytes(scores.numpy().astype("<f4").tobytes())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="length, minutes (default: %(default)s)"
    )
    parser.add_argument("--rate", type=float, default=1000.0, help="requests/s (default 1000)")
    parser.add_argument("--restart-s", type=float, default=120.0, help="a life (default 120 s)")
    parser.add_argument(
        "--kind",
        choices=("cpp", "python"),
        default="cpp",
        help="which server (default: %(default)s)",
    )
    parser.add_argument(
        "--server",
        type=Path,
        default=CPP_SERVER,
        help="the C++ server (default: the release build)",
    )
    parser.add_argument(
        "--rows", type=int, default=100_000, help="rows per table (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of requests (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dlrm.pt"
        write_model(dlrm(args.rows, "murmur3"), package, PackageOptions(name="dlrm"))
        return 0 if asyncio.run(Soak(args, package).run()) else 1


if __name__ == "__main__":
    sys.exit(main())
