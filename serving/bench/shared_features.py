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

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tessera.serving.bench.forward import DENSE, TABLES, dlrm, forwards
from tessera.serving.bench.server_load import counters
from tessera.serving.client import PredictorClient, RequestArrays, decode_response, encode_request
from tessera.serving.client.arrays import GroupArrays, SharedArrays
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, Runner
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import write_model
from tessera.serving.server.background import ServerProcess
from tessera.training.bench.harness import (
    CLOCKS,
    Clock,
    arguments,
    in_turns,
    machine,
    microseconds,
)

USER = 20
ROUNDS = 9
SHAPES = ((100, 1), (500, 1), (100, 50), (500, 50))
"""Candidates, and ids of each of the user's features."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One ranking request: dense ``[N, 13]`` float32, user ``[20, ids]``, item ``[6, N]`` int64."""

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
        own = torch.full((USER * rows,), ids, dtype=torch.int32)
        lengths = torch.cat([own, torch.ones(self.item.numel(), dtype=torch.int32)])
        values = torch.cat([user.flatten(), self.item.flatten()])
        sharing = torch.arange(TABLES) < USER, torch.zeros(count, dtype=torch.int32)
        return HostBatch.of(self.dense, (lengths, values), sharing=sharing if once else None)

    def message(self, names: list[str], *, once: bool) -> bytes:
        """The request as it is sent."""
        count = len(self.dense)
        whole = self.batch(once=once)
        lengths = whole.id_list_features_lengths.numpy()
        values = whole.id_list_features_values.numpy()
        bags, ids = (USER, self.user.numel()) if once else (0, 0)
        users = GroupArrays(lengths[:bags].reshape(bags, 1), values[:ids])
        row_index = np.zeros(count, np.int32)
        arrays = RequestArrays(
            batch_size=count,
            dense=self.dense.numpy(),
            id_list=GroupArrays(lengths[bags:].reshape(-1, count), values[ids:]),
            id_score_list=None,
            shared=SharedArrays(tuple(names[:USER]), users, row_index) if once else None,
        )
        return encode_request(arrays)


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
    forms = {
        "once": forwards(tessera, once),
        "repeated": forwards(tessera, repeated),
        "fbgemm": forwards(fbgemm, repeated),
    }
    return microseconds(forms, rounds=ROUNDS, seconds=seconds, clock=clock)


def measure_server(
    server: ServerProcess, messages: dict[str, bytes], candidates: int, seconds: float
) -> dict[str, tuple[float, float]]:
    """The median latency, and the server's CPU time per call, of each message, in microseconds."""

    def measure(message: bytes) -> tuple[list[float], float]:
        taken = []
        before = counters(server)["process_cpu_seconds_total"]
        end = time.perf_counter() + seconds / ROUNDS
        while (begin := time.perf_counter()) < end:
            client.send(message)
            taken.append(time.perf_counter() - begin)
        return taken, counters(server)["process_cpu_seconds_total"] - before

    with PredictorClient(server.address) as client:
        answers = {}
        for name, message in messages.items():
            for _ in range(20):
                answer = decode_response(client.send(message), candidates)
            answers[name] = answer.outputs["default"]
        if not np.array_equal(answers["once"], answers["repeated"]):
            raise RuntimeError("the two messages score differently")
        rounds = in_turns({n: partial(measure, one) for n, one in messages.items()}, ROUNDS)
    found = {}
    for name, own in rounds.items():
        latencies = list(itertools.chain(*(taken for taken, _ in own)))
        spent = sum(cpu for _, cpu in own)
        found[name] = (statistics.median(latencies) * 1e6, spent / len(latencies) * 1e6)
    return found


def main() -> None:
    parser = arguments(__doc__)
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
    print(f"{machine()}, {args.rows} rows")
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
        flags = ["--model", str(paths["tessera"]), "--workers", "1", "--drain-propagation-ms", "0"]
        with ServerProcess(flags, program=[str(args.server)]) as server:
            for candidates, ids in SHAPES:
                request = Request.drawn(candidates, ids, args.rows)
                messages = {
                    "once": request.message(names, once=True),
                    "repeated": request.message(names, once=False),
                }
                found = measure_server(server, messages, candidates, args.seconds)
                (once, once_cpu), (repeated, repeated_cpu) = found["once"], found["repeated"]
                print(
                    f"{candidates:6} x {ids:3} {once:9.0f} {repeated:9.0f} "
                    f"({repeated / once:.2f}); {once_cpu:9.0f} {repeated_cpu:9.0f} "
                    f"({repeated_cpu / once_cpu:.2f}); {len(messages['once'])} "
                    f"{len(messages['repeated'])}"
                )


if __name__ == "__main__":
    main()
