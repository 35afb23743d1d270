"""Time one forward of a package on the CPU, one thread, at B = 1, 8, 64 and 512.

Forms of the same model, with the same batches, in turns within one run:

* ``tessera``, ``fbgemm``: the files of both backends as a server runs them
  (`tessera.serving.package.loading.load_package`);
* ``own module``: the tessera backend's file of the same model as a module of a user's own, which holds
  the same layers and ends in a sigmoid; its graph and its answers' bits are compared with the first;
* ``tessera bf16``: the first with ``--dense-dtype bf16``;
* ``torch bf16``: ``optimized`` with both MLPs in torch's bfloat16;
* ``optimized``: the traced graph with FBGEMM's lookup through ``torch.jit.script`` and
  ``torch.jit.optimize_for_inference``, without packed layers;
* ``script``: the same through ``torch.jit.script`` as it comes;
* ``eager``: the served form before tracing.

The model: 13 dense features, 26 tables of D=64, MLP 13-512-256-64, dot interaction, MLP
512-256-1, random weights; one id per bag, drawn anew for every batch.

    python -m tessera.serving.bench.forward [--hashing murmur3] [--rows 100000] [--clock cpu]
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from tessera.serving.inspect.graph import read_graph
from tessera.serving.package.loading import load_package
from tessera.serving.package.runner import HostBatch, Runner, TorchScriptRunner
from tessera.serving.package.torchscript import optimize
from tessera.serving.packaging.lookups.backends import BACKENDS
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_model, write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.serving.packaging.script import script
from tessera.serving.packaging.servable import make_servable
from tessera.serving.packaging.trace import trace
from tessera.training.bench.harness import (
    CLOCKS,
    arguments,
    machine,
    microseconds,
    print_head,
    print_row,
)
from tessera.training.models.architectures.dlrm import DLRMConfig
from tessera.training.models.ranking import RankingModel, build_ranking_model
from tessera.training.modules.choices import Hashing
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

DENSE = 13
TABLES = 26
BATCH_SIZES = (1, 8, 64, 512)
BATCHES = 32  # distinct ones in turn, so that rows do not stay in the first cache
ROUNDS = 15


def dlrm(rows: int, hashing: Hashing, *, device: str | None = None) -> RankingModel:
    """The benchmark's model, with random weights; with the ``device`` meta its tables take no memory."""
    torch.manual_seed(0)
    config = DLRMConfig(
        embedding_dim=64,
        dense_layers=(512, 256),
        over_layers=(512, 256),
        rows=rows,
        hashing=hashing,
        dense_missing="zero",
    )
    dense = [f"int_{index}" for index in range(DENSE)]
    sparse = [f"cat_{index}" for index in range(TABLES)]
    return build_ranking_model(config, dense, sparse, device=device).eval()


def random_batch(batch_size: int, rows: int, generator: torch.Generator) -> HostBatch:
    """One id per bag, uniform over the table."""
    dense = torch.randn(batch_size, DENSE, generator=generator)
    ids = torch.randint(0, rows, (TABLES * batch_size,), generator=generator)
    return HostBatch.of(dense, (torch.ones(len(ids), dtype=torch.int32), ids))


def forwards(runner: Runner, batches: Iterable[HostBatch]) -> Callable[[], object]:
    """Runs the batches in turn, one a call."""
    turns = itertools.cycle(batches)
    return lambda: runner.forward(next(turns))


class OwnModule(nn.Module):
    """The benchmark's model as somebody writes it who does not use `tessera train`."""

    def __init__(self, model: RankingModel) -> None:
        super().__init__()
        self.encoder, self.hasher, self.dlrm = model.encoder, model.hasher, model.arch

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        """``[B, 13]`` and raw ids to probabilities ``[B]``."""
        logits = self.dlrm(self.encoder(dense, ids.stride()), self.hasher(ids))
        return torch.sigmoid(logits.squeeze(1))


def check_same(paths: tuple[Path, Path], batches: list[HostBatch]) -> None:
    """Hold two packages' graphs and answers against each other; exit where they differ."""
    first, second = (load_package(path).runner for path in paths)
    scripted = [torch.jit.load(str(path)) for path in paths]  # type: ignore[no-untyped-call] # torch's own has no types
    graphs = [[node.name for node in read_graph(module).nodes] for module in scripted]
    if graphs[0] != graphs[1]:
        raise SystemExit(f"the graphs of {paths[0].name} and {paths[1].name} differ")
    for batch in batches:
        one, other = first.forward(batch), second.forward(batch)
        if not all(torch.equal(one[name], other[name]) for name in one):
            raise SystemExit(f"answers of {paths[0].name} and {paths[1].name} differ")


class InBfloat16(nn.Module):
    """A part of a model in torch's bfloat16, with float32 around it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """``[B, K]`` to ``[B, N]`` float32."""
        result: Tensor = self.part(x.to(torch.bfloat16))
        return result.float()


def in_bfloat16(eager: nn.Module) -> nn.Module:
    """A copy of the served form with both MLPs in bfloat16."""
    copied = copy.deepcopy(eager)
    for name in ("dense_arch", "over_arch"):
        arch = copied.get_submodule(f"module.model.arch.{name}")
        arch.model = InBfloat16(arch.get_submodule("model"))
    return copied


def make_runners(rows: int, hashing: Hashing, folder: Path) -> dict[str, Runner]:
    model = dlrm(rows, hashing)
    runners: dict[str, Runner] = {}
    for backend in BACKENDS:
        path = folder / f"{backend}.pt"
        write_model(model, path, PackageOptions(name="dlrm", backend=backend))
        runners[backend] = load_package(path).runner
        if backend == "tessera":
            own = folder / "own.pt"
            _, inputs, sample = ranking_source(model)
            package_model(OwnModule(model), inputs, sample, out=own, name="dlrm", backend=backend)
            generator = torch.Generator().manual_seed(1)
            check_same((path, own), [random_batch(B, rows, generator) for B in BATCH_SIZES])
            runners["own module"] = load_package(own).runner
            options = PackageOptions(name="dlrm", backend=backend, dense_dtype="bf16")
            write_model(model, path, options)
            runners["tessera bf16"] = load_package(path).runner
    eager = make_servable(
        ranking_source(model), PackageOptions(name="dlrm", backend="fbgemm")
    ).eager
    return {
        **runners,
        "torch bf16": TorchScriptRunner(optimize(script(trace(in_bfloat16(eager))))),
        "optimized": TorchScriptRunner(optimize(script(trace(eager)))),
        "script": TorchScriptRunner(script(trace(eager))),
        "eager": TorchScriptRunner(eager),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default 100000)")
    parser.add_argument(
        "--hashing",
        choices=["none", "modulo", "murmur3"],
        default="murmur3",
        help="the features' hashing rule (default murmur3)",
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds per form and batch size (default 2)"
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="wall time, or the thread's CPU time, for a machine that others use (default wall)",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runners = make_runners(args.rows, args.hashing, Path(folder))
    print(f"{machine()}, 1 thread, int8, {args.rows} rows a table,")
    print(f"hashing {args.hashing}; median of {ROUNDS} rounds, microseconds of {args.clock} time")
    first, *others = runners
    print_head("B", *runners, *(f"{name} / {first}" for name in others))
    for batch_size in BATCH_SIZES:
        generator = torch.Generator().manual_seed(batch_size)
        batches = [random_batch(batch_size, args.rows, generator) for _ in range(BATCHES)]
        found = microseconds(
            {name: forwards(runner, batches) for name, runner in runners.items()},
            rounds=ROUNDS,
            seconds=args.seconds,
            clock=CLOCKS[args.clock],
        )
        ratios = (f"{found[name] / found[first]:.2f}" for name in others)
        print_row(batch_size, *(f"{found[name]:.0f}" for name in runners), *ratios)


if __name__ == "__main__":
    main()
