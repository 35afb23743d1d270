"""Time a package's forward on one GPU, and compare packages of one model.

    python cpp_server/bench/gpu_forward.py MODEL.pt [MORE.pt ...] [--batch 256 16384]
        [--ids-per-bag 3,2,1,...] [--profile]

Each package comes from ``package-model --device cuda`` (``mlperf_package.py`` beside this script makes those
of MLPerf's DLRM-DCNv2).  Columns, in microseconds a batch: inputs on the device, called from Python through
TorchScript; the same as a CUDA graph; and from pinned host memory with the answers back in it, by one, two
and three streams, each of which copies, replays its graph and copies, so that copies run beside the
computation.  Inputs are int32 ids, drawn uniformly, fresh in turn from four batches; medians of `ROUNDS`.
Packages are timed in turns.  ``--profile`` adds the kernels of a forward.  The largest difference of a score
from the first package's is printed last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.serving.package.loading import load_package
from tessera.serving.package.schema import InputSchema

SETS = 4
ROUNDS = 7
STREAMS = (1, 2, 3)

Inputs = tuple[Tensor, ...]


def draw(schema: InputSchema, batch: int, ids_per_bag: list[int], seed: int) -> Inputs:
    """The six inputs of a package, in pinned memory."""
    generator = torch.Generator().manual_seed(seed)
    features = schema.group("id_list")
    counts = ids_per_bag * len(features) if len(ids_per_bag) == 1 else ids_per_bag
    if len(counts) != len(features) or schema.group("id_score_list"):
        raise SystemExit(f"--ids-per-bag has {len(counts)} numbers for {len(features)} features")
    lengths = torch.tensor(counts, dtype=torch.int32).repeat_interleave(batch)
    ids = [
        torch.randint(0, feature.rows, (count * batch,), dtype=torch.int32, generator=generator)
        for feature, count in zip(features, counts, strict=True)
    ]
    dense = torch.randn(batch, len(schema.dense_features), generator=generator)
    none = torch.empty(0, dtype=torch.int32)
    given = (dense, lengths, torch.cat(ids), none, none, torch.empty(0))
    return tuple(tensor.pin_memory() for tensor in given)


def without_copies_back(module: Any) -> Any:
    """The forward of a frozen module with its outputs left on the device, as servers use it.

    Loading has called the module, so that a plan of its graph is kept; a copy has none.
    """
    graph = module.graph.copy()
    for node in graph.findAllNodes("aten::cpu"):
        node.output().replaceAllUsesWith(next(iter(node.inputs())))
        node.destroy()
    graph.eraseInput(0)  # the module itself, which holds nothing when it is frozen
    return torch._C._create_function_from_graph("forward", graph)  # noqa: SLF001 - there is no other way


@dataclass
class Lane:
    """A stream with room for a batch's inputs and scores, and the graph that works on it."""

    stream: torch.cuda.Stream
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    scores: Tensor
    back: Tensor

    def score(self, host: Inputs) -> None:
        """Copy a batch there, compute it and copy its scores back; returns at once."""
        with torch.cuda.stream(self.stream):
            for there, here in zip(self.inputs, host, strict=True):
                there.copy_(here, non_blocking=True)
            self.graph.replay()
            self.back.copy_(self.scores, non_blocking=True)


class Package:
    """A loaded package and ways to run it."""

    def __init__(self, path: Path) -> None:
        loaded = load_package(path, devices=["cuda:0"])
        self.name = path.name
        self.schema = loaded.manifest.schema
        runner: Any = loaded.runner
        self.module = without_copies_back(runner._module)  # noqa: SLF001 - it copies scores back itself

    def forward(self, inputs: Inputs) -> Tensor:
        """The first output, on the device."""
        with torch.inference_mode():
            found: dict[str, Tensor] = self.module(*inputs)
        return next(iter(found.values()))

    def lane(self, host: Inputs) -> Lane:
        """A lane for batches like ``host``."""
        inputs = tuple(tensor.cuda() for tensor in host)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.forward(inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            scores = self.forward(inputs)
        return Lane(
            stream, graph, inputs, scores, torch.empty_like(scores, device="cpu").pin_memory()
        )


def median_us(work: Callable[[], int]) -> float:
    """Microseconds a batch of ``work``, which starts some batches and says how many."""
    work()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        count = work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / count * 1e6)
    return statistics.median(times)


def ways(package: Package, batch: int, ids_per_bag: list[int]) -> dict[str, Callable[[], int]]:
    """What to time, by the name of its column."""
    hosts = [draw(package.schema, batch, ids_per_bag, seed) for seed in range(SETS)]
    there = [tuple(tensor.cuda() for tensor in host) for host in hosts]
    lanes = [package.lane(host) for host in hosts[: max(STREAMS)]]
    fixed = [package.lane(host) for host in hosts]
    rounds = 8 if batch > 1024 else 50

    def on_device() -> int:
        for k in range(rounds * SETS):
            package.forward(there[k % SETS])
        return rounds * SETS

    def as_graph() -> int:
        for k in range(rounds * SETS):
            fixed[k % SETS].graph.replay()
        return rounds * SETS

    def pinned(streams: int) -> Callable[[], int]:
        def run() -> int:
            for k in range(rounds * SETS):
                lanes[k % streams].score(hosts[k % SETS])
            return rounds * SETS

        return run

    return {
        "device": on_device,
        "graph": as_graph,
        **{f"pinned {streams}": pinned(streams) for streams in STREAMS},
    }


def profile(package: Package, batch: int, ids_per_bag: list[int]) -> None:
    """Print the kernels of a forward."""
    there = tuple(tensor.cuda() for tensor in draw(package.schema, batch, ids_per_bag, 0))
    package.forward(there)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(SETS):
            package.forward(there)
        torch.cuda.synchronize()
    print(f"{package.name}, B={batch}: us a forward, launches, kernel")
    for entry in sorted(seen.key_averages(), key=lambda found: -found.device_time_total):
        if entry.device_time_total > 0:
            per_forward = entry.device_time_total / SETS
            print(f"  {per_forward:8.1f} {entry.count / SETS:5.1f}  {entry.key[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", type=Path, help="made with --device cuda")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[256, 16384], help="samples (default: 256 16384)"
    )
    parser.add_argument("--ids-per-bag", default="1", help="for all features, or one for each")
    parser.add_argument("--profile", action="store_true", help="also show the kernels")
    args = parser.parse_args()
    ids_per_bag = [int(count) for count in args.ids_per_bag.split(",")]
    packages = [Package(path) for path in args.packages]
    for batch in args.batch:
        timed = [(package, ways(package, batch, ids_per_bag)) for package in packages]
        columns = list(timed[0][1])
        print(f"B={batch}: us a batch (million samples/s)  " + "  ".join(columns))
        for package, found in timed:
            cells = [median_us(found[column]) for column in columns]
            row = "  ".join(f"{us:8.1f} ({batch / us:5.2f})" for us in cells)
            print(f"  {package.name:20} {row}", flush=True)
        if args.profile:
            for package in packages:
                profile(package, batch, ids_per_bag)
    there = tuple(t.cuda() for t in draw(packages[0].schema, args.batch[-1], ids_per_bag, 99))
    scores = [package.forward(there).float() for package in packages]
    for package, its in zip(packages[1:], scores[1:], strict=True):
        change = float((its - scores[0]).abs().max())
        print(f"{package.name}: the largest change of {len(its)} scores is {change:.5f}")


if __name__ == "__main__":
    main()
