"""Training samples per second on 1, 2, 4 ... ranks, with and without the sparse pipeline.

A DLRM of Criteo Kaggle's shape (13 dense values; 26 tables with one id each, 33.8 million rows in
all, D = 128; MLPs 512-256-128 and 1024-1024-512-256-1) is built on the ``meta`` device, planned
with bandwidths measured on the spot, and trained with row-wise Adagrad on the tables and Adam on
the rest, its layers in ``--precision`` (`tessera.training.trainer.precision`).  Every rank has its own
batches of ``--batch-size`` samples (weak scaling), drawn before the clock starts and lying in host memory.

In each world the contenders train in turn, round after round; a number is the median of the
rounds, all ranks together.  On GPUs one more round runs under the profiler: "NCCL" is the share
of the step during which the GPU ran a collective, whether or not anything overlapped with it.

    python -m tessera.training.bench.scaling --device cuda --worlds 1,2,4
    python -m tessera.training.bench.scaling --device cpu --worlds 1,2 --rows-cap 100000 --batch-size 1024
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from tessera.training import (
    DLRM,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    in_backward_optimizer_filter,
)
from tessera.training.bench.harness import arguments, in_turns, machine, medians
from tessera.training.bench.ranks import in_ranks
from tessera.training.data.batch import Batch
from tessera.training.distributed.planner import (
    EmbeddingShardingPlanner,
    Topology,
    measure_bandwidths,
)
from tessera.training.distributed.planner.stats import report_text
from tessera.training.distributed.train_pipeline.pipelines import TrainPipelineBase
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.trainer.graphs import record_layers
from tessera.training.trainer.precision import (
    Precision,
    check_precision,
    layers_in,
    prepare_layers,
    products_in,
    vectors_in,
)

# Distinct values of Criteo Kaggle's 26 categorical columns.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
F_DENSE, DIM = 13, 128
CONTENDERS: dict[str, type[TrainPipelineBase[Any, Any]]] = {
    "plain": TrainPipelineBase,
    "pipeline": TrainPipelineSparseDist,
}


def draw(rows: list[int], count: int, batch_size: int, seed: int) -> list[Batch]:
    """Batches with power-law ids: density proportional to 1/(id + 1), as real features have."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"f{index}" for index in range(len(rows))]
    sizes = torch.tensor(rows, dtype=torch.float64).unsqueeze(1)
    batches = []
    for _ in range(count):
        u = torch.rand(len(rows), batch_size, generator=generator, dtype=torch.float64)
        ids = (sizes + 1).pow(u).sub(1).long().clamp(min=0).minimum(sizes.long() - 1)
        batches.append(
            Batch(
                torch.randn(batch_size, F_DENSE, generator=generator),
                KeyedJaggedTensor(
                    names, ids.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int32)
                ),
                (torch.rand(batch_size, generator=generator) < 0.25).float(),
            )
        )
    return batches


@dataclass(frozen=True)
class Settings:
    """What one world measures."""

    device: str
    rows_cap: int
    batch_size: int
    steps: int
    rounds: int
    precision: Precision = "fp32"
    cuda_graphs: bool = False


class MeasuredTrain(DLRMTrain):
    """`DLRMTrain` with its layers in a precision of the trainer's."""

    def __init__(self, model: DLRM, precision: Precision, device: torch.device) -> None:
        super().__init__(model)
        self._layers = partial(layers_in, precision, device)

    def forward(self, batch: Any) -> Any:
        """See `DLRMTrain`."""
        with self._layers():
            return super().forward(batch)


def build(rows: list[int], device: torch.device, settings: Settings, rank: int) -> Any:
    """The model, planned and sharded, and the optimizer of its dense part."""
    tables = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(count, DIM, name=f"t{index}", feature_names=[f"f{index}"])
            for index, count in enumerate(rows)
        ],
    )
    model = MeasuredTrain(
        DLRM(
            tables,
            dense_in_features=F_DENSE,
            dense_arch_layer_sizes=[512, 256, DIM],
            over_arch_layer_sizes=[1024, 1024, 512, 256, 1],
            dense_device=device,
        ),
        settings.precision,
        device,
    )
    fused: dict[str, Any] = {"learning_rate": 0.01, **vectors_in(settings.precision, device)}
    if device.type == "cuda":
        fused["bounds_check_mode"] = (
            "none"  # as the trainer has it, whose hasher makes rows of all ids
        )
    sharder = EmbeddingBagCollectionSharder(fused)
    measured = measure_bandwidths(device)
    world = dist.get_world_size()
    topology = Topology(
        world,
        device.type,
        local_world_size=world,
        hbm_mem_bw=measured.mem_bw,
        ddr_mem_bw=measured.mem_bw,
        intra_host_bw=measured.intra_host_bw,
    )
    planner = EmbeddingShardingPlanner(topology, batch_size=settings.batch_size)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    if rank == 0 and planner.report is not None:
        print(report_text(planner.report), flush=True)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])
    prepare_layers(
        sharded.module, settings.precision, device, logit_layers=["model.over_arch.model.1"]
    )
    if settings.cuda_graphs:
        arch = sharded.module.get_submodule("model")
        record_layers(arch, partial(layers_in, settings.precision, device, caches=False))
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=1e-3, fused=device.type == "cuda")
    return sharded, optimizer, measured


def run_round(pipeline: Any, batches: Iterator[Any], settings: Settings) -> float:
    """Seconds for ``settings.steps`` steps; every rank begins and ends together."""

    def meet() -> None:
        if settings.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    meet()
    started = time.perf_counter()
    for _ in range(settings.steps):
        pipeline.progress(batches)
    meet()
    return time.perf_counter() - started


def finish(pipeline: TrainPipelineSparseDist[Any, Any]) -> None:
    """Train on what is in the pipeline, and give the model back."""
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(iter(()))
    pipeline.detach()


def nccl_share(pipeline: Any, batches: Iterator[Any], settings: Settings) -> float:
    """The share of a round's time in which the GPU ran a collective."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - slow to import

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        seconds = run_round(pipeline, batches, settings)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if "nccl" in event.name.lower() and event.device_type.name == "CUDA"
    )
    busy_us, reached = 0.0, 0.0
    for start, end in spans:
        busy_us += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy_us / 1e6 / seconds


def work(settings: Settings) -> dict[str, Any]:
    """One rank of one world: what it measured."""
    rank, world = dist.get_rank(), dist.get_world_size()
    on_gpu = settings.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if not on_gpu:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    check_precision(settings.precision, device)
    rows = [min(count, settings.rows_cap) for count in CRITEO_ROWS]
    model, optimizer, measured = build(rows, device, settings, rank)
    drawn = draw(rows, 8, settings.batch_size, seed=rank)
    batches = itertools.cycle([batch.pin_memory() if on_gpu else batch for batch in drawn])

    def measure(make: Any, figure: Callable[[Any, Iterator[Any], Settings], float]) -> float:
        pipeline = make(model, optimizer, device)
        pipeline.progress(batches)
        found = figure(pipeline, batches, settings)
        if isinstance(pipeline, TrainPipelineSparseDist):
            finish(pipeline)
        return found

    rounds = {name: partial(measure, make, run_round) for name, make in CONTENDERS.items()}
    with products_in(settings.precision):
        in_turns(rounds, 1)  # warms up
        seconds = medians(in_turns(rounds, settings.rounds))
        shares = {
            name: measure(make, nccl_share) if on_gpu else None for name, make in CONTENDERS.items()
        }
    samples = world * settings.batch_size * settings.steps
    return {
        "contenders": {
            name: {"samples_per_s": samples / taken, "nccl_share": shares[name]}
            for name, taken in seconds.items()
        },
        "bandwidths": {"mem_bw": measured.mem_bw, "intra_host_bw": measured.intra_host_bw},
    }


def measure_world(world: int, settings: Settings) -> dict[str, Any]:
    backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
    found: dict[str, Any] = in_ranks(work, world, backend, settings)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default: cpu")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks; default: 1,2")
    parser.add_argument(
        "--rows-cap", type=int, default=max(CRITEO_ROWS), help="most rows of a table; default: all"
    )
    parser.add_argument("--batch-size", type=int, default=8192, help="samples per rank and step")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round; default: 20")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; default: 5")
    parser.add_argument(
        "--precision", choices=get_args(Precision), default="fp32", help="default: fp32"
    )
    parser.add_argument("--cuda-graphs", action="store_true", help="record the layers")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    settings = Settings(
        args.device,
        args.rows_cap,
        args.batch_size,
        args.steps,
        args.rounds,
        args.precision,
        args.cuda_graphs,
    )
    print(f"{machine()}{f', {torch.cuda.get_device_name()}' if args.device == 'cuda' else ''}")
    worlds = [int(number) for number in args.worlds.split(",")]
    found = {world: measure_world(world, settings) for world in worlds}
    print_table(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


def print_table(found: dict[int, Any]) -> None:
    first = min(found)
    base = {name: found[first]["contenders"][name]["samples_per_s"] / first for name in CONTENDERS}
    print("ranks  contender   samples/s  efficiency  over plain  NCCL   GB/s between ranks")
    for world, figures in found.items():
        between = figures["bandwidths"]["intra_host_bw"]
        plain = figures["contenders"]["plain"]["samples_per_s"]
        for name, figure in figures["contenders"].items():
            rate, share = figure["samples_per_s"], figure["nccl_share"]
            print(
                f"{world:>5}  {name:<9} {rate:>11,.0f}  {rate / world / base[name]:>9.0%}  "
                f"{rate / plain:>9.2f}x  {'-' if share is None else f'{share:.0%}':>4}  "
                f"{'-' if between is None else f'{between / 1e9:.1f}':>6}"
            )


if __name__ == "__main__":
    main()
