"""What looking a ranking request's user features up once is worth, against repeating them.

One request of one user and N candidates in two forms: ``once`` gives the user's features in one row
(`forward_shared`), ``repeated`` gives every candidate its own copy of them, as a server without shared
rows has it.  Both score alike, to the bit; that is checked.  In turns within one run:

* one forward in this process, one thread, of the tessera package by either way and of the fbgemm
  package, which can only repeat;
* one call at a time through ``tessera-server`` with one worker: latency at the client, and CPU time of
  the server per request, of both messages.

The model is `serving.bench.forward`'s: 13 dense features, 26 tables of D=64 (20 of the user, 6 of the
item), hashed by murmur3, one id per item bag.

    python -m tessera.serving.bench.shared_features [--rows 100000] [--seconds 1] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import torch

from tessera.serving.bench.forward import CLOCKS, DENSE, TABLES, Clock, dlrm
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.protocol import predictor_pb2 as pb

USER = 20
ROUNDS = 9
SHAPES = ((100, 1), (500, 1), (100, 50), (500, 50))
"""Candidates, and ids of each of the user's features."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One ranking request.

    Attributes:
        dense: ``[N, 13]`` float32.
        user: ``[20, ids]`` int64.
        item: ``[6, N]`` int64.
    """

    dense: torch.Tensor
    user: torch.Tensor
    item: torch.Tensor

    @classmethod
    def drawn(cls, candidates: int, ids: int, rows: int) -> Request:
        """Uniform ids."""
        return cls(
            dense=torch.randn(candidates, DENSE),
            user=torch.randint(0, rows, (USER, ids)),
            item=torch.randint(0, rows, (TABLES - USER, candidates)),
        )

    def batch(self, *, once: bool) -> HostBatch:
        """The request as the model takes it."""
        count, ids = len(self.dense), self.user.shape[1]
        rows = 1 if once else count
        user = self.user if once else self.user.repeat(1, count)
        empty = torch.empty(0, dtype=torch.int32)
        return HostBatch(
            float_features=self.dense,
            id_list_features_lengths=torch.cat(
                [
                    torch.full((USER * rows,), ids, dtype=torch.int32),
                    torch.ones(self.item.numel(), dtype=torch.int32),
                ]
            ),
            id_list_features_values=torch.cat([user.flatten(), self.item.flatten()]),
            id_score_list_features_lengths=empty,
            id_score_list_features_values=empty.long(),
            id_score_list_features_weights=empty.float(),
            batch_size=count,
            id_list_features_shared=torch.arange(TABLES) < USER if once else None,
            shared_row_index=torch.zeros(count, dtype=torch.int32) if once else None,
        )

    def message(self, names: list[str], *, once: bool) -> bytes:
        """The request as it is sent."""
        count = len(self.dense)
        message = pb.PredictionRequest(batch_size=count)
        message.float_features.num_features = DENSE
        message.float_features.values = self.dense.numpy().tobytes()
        whole = self.batch(once=once)
        lengths = whole.id_list_features_lengths.numpy()
        values = whole.id_list_features_values.numpy()
        bags, ids = 0, 0
        if once:
            shared = message.shared_features
            bags, ids = USER, self.user.numel()
            shared.names.extend(names[:USER])
            shared.num_rows = 1
            shared.row_index = np.zeros(count, "<i4").tobytes()
            shared.features.num_features = USER
            shared.features.lengths = lengths[:bags].tobytes()
            shared.features.values_int64 = values[:ids].tobytes()
        message.id_list_features.num_features = TABLES - USER if once else TABLES
        message.id_list_features.lengths = lengths[bags:].tobytes()
        message.id_list_features.values_int64 = values[ids:].tobytes()
        return message.SerializeToString()


def in_turns(
    forms: dict[str, Callable[[], object]], seconds: float, clock: Clock
) -> dict[str, float]:
    """Each form's time per call in microseconds: the median over rounds."""
    calls = {}
    for name, call in forms.items():
        begin = clock()
        for _ in range(5):
            call()
        calls[name] = max(2, int(seconds / ROUNDS / (clock() - begin) * 5))
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(ROUNDS):
        for name, call in forms.items():
            begin = clock()
            for _ in range(calls[name]):
                call()
            times[name].append((clock() - begin) / calls[name] * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


def measure_forward(
    runners: dict[str, Runner], shape: tuple[int, int], rows: int, seconds: float, clock: Clock
) -> dict[str, float]:
    """Microseconds of one forward by each way."""
    tessera, fbgemm = runners["tessera"], runners["fbgemm"]
    requests = [Request.drawn(*shape, rows) for _ in range(8)]
    once = [request.batch(once=True) for request in requests]
    repeated = [request.batch(once=False) for request in requests]
    for compact, plain in zip(once, repeated, strict=True):
        found, expected = tessera.forward(compact), tessera.forward(plain)
        if not torch.equal(found["default"], expected["default"]):
            raise RuntimeError("the two forms score differently")
    turn = {"once": 0, "repeated": 0, "fbgemm": 0}

    def caller(name: str, runner: Runner, batches: list[HostBatch]) -> Callable[[], object]:
        def call() -> object:
            turn[name] += 1
            return runner.forward(batches[turn[name] % len(batches)])

        return call

    return in_turns(
        {
            "once": caller("once", tessera, once),
            "repeated": caller("repeated", tessera, repeated),
            "fbgemm": caller("fbgemm", fbgemm, repeated),
        },
        seconds,
        clock,
    )


@contextmanager
def running(program: Path, package: Path) -> Iterator[tuple[str, str]]:
    """A server with one worker; its gRPC and HTTP addresses."""
    command = [str(program), "--model", str(package), "--workers", "1", "--host", "127.0.0.1"]
    command += ["--port", "0", "--http-port", "0", "--drain-propagation-ms", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                entry = json.loads(line)
                if entry["event"] == "ready":
                    yield f"127.0.0.1:{entry['port']}", f"127.0.0.1:{entry['http_port']}"
                    return
            raise RuntimeError(f"{program} ended before it was ready")
        finally:
            process.terminate()


def cpu_seconds(http_address: str) -> float:
    """What the server has spent so far."""
    with urllib.request.urlopen(f"http://{http_address}/metrics") as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith("process_cpu_seconds_total "):
                return float(line.split()[1])
    raise RuntimeError("the server counts no CPU time")


def measure_server(
    addresses: tuple[str, str], messages: dict[str, bytes], seconds: float
) -> dict[str, tuple[float, float]]:
    """The median latency, and the server's CPU time per call, of each message, in microseconds."""
    address, http_address = addresses
    latencies: dict[str, list[float]] = {name: [] for name in messages}
    spent = dict.fromkeys(messages, 0.0)
    answers = {}
    with grpc.insecure_channel(address) as channel:
        predict = channel.unary_unary("/predictor.Predictor/Predict", None, None)
        for name, message in messages.items():
            for _ in range(20):
                answers[name] = pb.PredictionResponse.FromString(predict(message)).predictions
        if answers["once"]["default"] != answers["repeated"]["default"]:
            raise RuntimeError("the two messages score differently")
        for _ in range(ROUNDS):
            for name, message in messages.items():
                before = cpu_seconds(http_address)
                end = time.perf_counter() + seconds / ROUNDS
                while (begin := time.perf_counter()) < end:
                    predict(message)
                    latencies[name].append(time.perf_counter() - begin)
                spent[name] += cpu_seconds(http_address) - before
    return {
        name: (
            statistics.median(latencies[name]) * 1e6,
            spent[name] / len(latencies[name]) * 1e6,
        )
        for name in messages
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each table")
    parser.add_argument("--seconds", type=float, default=1.0, help="per form and shape")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="of a forward: cpu leaves out what others on the machine take (default: wall)",
    )
    parser.add_argument(
        "--server",
        type=Path,
        default=Path("build/cpp/release/tessera-server"),
        help="the program; where it is not there, only forwards are measured "
        "(default: build/cpp/release/tessera-server)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {args.rows} rows"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = dlrm(args.rows, "murmur3")
        runners: dict[str, Runner] = {}
        paths: dict[str, Path] = {}
        for backend in ("tessera", "fbgemm"):
            paths[backend] = Path(folder) / f"{backend}.pt"
            write_model(model, paths[backend], PackageOptions(name="ranker", backend=backend))
            loaded = load_package(paths[backend])
            runners[backend] = loaded.runner
        names = [f.name for f in loaded.manifest.schema.group("id_list")]
        print("one forward, us: candidates x ids   once  repeated (ratio)  fbgemm (ratio)")
        for candidates, ids in SHAPES:
            took = measure_forward(
                runners, (candidates, ids), args.rows, args.seconds, CLOCKS[args.clock]
            )
            ratios = {name: took[name] / took["once"] for name in took}
            print(
                f"{candidates:6} x {ids:3} {took['once']:9.0f} {took['repeated']:9.0f} "
                f"({ratios['repeated']:.2f}) {took['fbgemm']:9.0f} ({ratios['fbgemm']:.2f})"
            )
        if not args.server.exists():
            print(f"{args.server} is not there: the server is not measured (make build)")
            return
        print("tessera-server, us: candidates x ids   once  repeated (ratio); CPU; bytes sent")
        with running(args.server, paths["tessera"]) as addresses:
            for candidates, ids in SHAPES:
                request = Request.drawn(candidates, ids, args.rows)
                messages = {
                    "once": request.message(names, once=True),
                    "repeated": request.message(names, once=False),
                }
                found = measure_server(addresses, messages, args.seconds)
                (once, once_cpu), (repeated, repeated_cpu) = found["once"], found["repeated"]
                print(
                    f"{candidates:6} x {ids:3} {once:9.0f} {repeated:9.0f} "
                    f"({repeated / once:.2f}); {once_cpu:9.0f} {repeated_cpu:9.0f} "
                    f"({repeated_cpu / once_cpu:.2f}); {len(messages['once'])} "
                    f"{len(messages['repeated'])}"
                )


if __name__ == "__main__":
    main()
