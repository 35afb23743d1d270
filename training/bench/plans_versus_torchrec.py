"""Plans of this planner beside TorchRec's, for seeded random models on the same hardware.

    python training/bench/plans_versus_torchrec.py [--models 50] [--seed 0] [--out plans.json]

TorchRec must be installed.  Both planners get the same tables, the same `ParameterConstraints`, the same
memory after the same fixed share of it is reserved, and the same bandwidths, and search with their
default proposers.  Models of even number may only take the kernel ``fused``; those of odd number may also
be replicated (``dense``) and lie in host memory (``fused_uvm_caching``, ``fused_uvm``).

Each plan is rated twice: by this planner's estimates and by TorchRec's, which count other things.  A
rating is the time of the busiest rank; a plan that overfills a rank by an estimate of storage "does not
fit".  Ratings within `EQUAL` of each other are equal.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib
import importlib.util
import json
import logging
import math
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner import (
    EmbeddingEnumerator,
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from tessera.training.distributed.planner.perf_models import NoopPerfModel
from tessera.training.distributed.planner.stats import NoopEmbeddingStats
from tessera.training.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
)
from tessera.training.distributed.planner.types import Shard, per_rank
from tessera.training.distributed.sharding.by_hand import placement
from tessera.training.modules.embedding_configs import EmbeddingBagConfig
from tessera.training.modules.embedding_modules import EmbeddingBagCollection

EQUAL = 1e-3
RESERVED = 0.1
GIB = 1024**3
BANDWIDTHS: dict[str, Any] = {  # bytes per second: an H100 in a host of eight
    "hbm_mem_bw": 2.6e12,
    "ddr_mem_bw": 50e9,
    "hbm_to_ddr_mem_bw": 50e9,
    "intra_host_bw": 300e9,
    "inter_host_bw": 25e9,
}
SHARDED = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"]
OFF_DEVICE = ["fused_uvm_caching", "fused_uvm"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A random model and its hardware.

    Fields:
        tables: rows, columns and ids per bag of each.
        ranks: in hosts of eight at most.
        memory_bytes: of each rank's device.
        batch_size: samples per rank and step.
        may_leave_hbm: whether tables may be replicated or, with GPUs, lie in host memory.
        device: ``cuda`` or ``cpu``.
        bandwidths: bytes per second, under the names of `Topology`'s parameters.
    """

    tables: list[tuple[int, int, float]]
    ranks: int
    memory_bytes: int
    batch_size: int
    may_leave_hbm: bool
    device: str = "cuda"
    bandwidths: dict[str, Any] = dataclasses.field(default_factory=BANDWIDTHS.copy)

    def memory(self) -> dict[str, Any]:
        """The memory of a rank, under the name of `Topology`'s parameter."""
        return {"ddr_cap" if self.device == "cpu" else "hbm_cap": self.memory_bytes}


def random_model(seed: int, *, may_leave_hbm: bool) -> Model:
    """Tables of 1,000 to 30 million rows, whose bytes fill a third to nine tenths of the memory."""
    draw = random.Random(seed)  # noqa: S311 - test data
    tables = [
        (
            int(math.exp(draw.uniform(math.log(1e3), math.log(3e7)))),
            draw.choice([32, 64, 128, 256]),
            float(draw.choice([1, 1, 2, 5, 20, 50])),
        )
        for _ in range(draw.randint(4, 40))
    ]
    ranks = draw.choice([2, 4, 8, 16])
    held = sum(rows * (columns + 1) * 4 for rows, columns, _ in tables)
    filled = draw.uniform(0.8, 2.0) if may_leave_hbm else draw.uniform(0.33, 0.85)
    per_rank_bytes = held / ranks / filled + 2 * GIB
    return Model(tables, ranks, int(per_rank_bytes), draw.choice([512, 2048, 8192]), may_leave_hbm)


Placed = dict[str, tuple[str, str, list[tuple[list[int], list[int], int]]]]
"""By table: strategy, kernel, and offset, size and rank of each shard."""


class Side:
    """One of the planners: its plan of a model, and its ratings of any plan."""

    name: str

    def plan(self) -> Placed:
        """The planner's own plan."""
        raise NotImplementedError

    def rate(self, placed: Placed) -> tuple[float, bool]:
        """Milliseconds of the busiest rank by this side's estimate, and whether every rank has room."""
        raise NotImplementedError


def allowed(model: Model) -> dict[str, Any]:
    """What constraints say of every table of a model."""
    if not model.may_leave_hbm:
        return {"sharding_types": SHARDED, "compute_kernels": ["fused"]}
    return {
        "sharding_types": [*SHARDED, "data_parallel"],
        "compute_kernels": ["fused", "dense", *(OFF_DEVICE if model.device == "cuda" else [])],
    }


class Tessera(Side):
    """This planner."""

    name = "Tessera"

    def __init__(self, model: Model) -> None:
        self._tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(rows, columns, name=f"t{i}", feature_names=[f"f{i}"])
                for i, (rows, columns, _) in enumerate(model.tables)
            ],
            device=torch.device("meta"),
        )
        self._sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder()]
        self._topology = Topology(
            model.ranks,
            model.device,
            local_world_size=min(8, model.ranks),
            **model.memory(),
            **model.bandwidths,
        )
        constraints = {
            f"t{i}": ParameterConstraints(pooling_factors=[ids], **allowed(model))
            for i, (_, _, ids) in enumerate(model.tables)
        }
        self._enumerator = EmbeddingEnumerator(self._topology, model.batch_size, constraints)
        self._planner = EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=model.batch_size,
            storage_reservation=FixedPercentageStorageReservation(RESERVED),
            constraints=constraints,
            stats=NoopEmbeddingStats(),
        )

    def plan(self) -> Placed:
        """The planner's own plan."""
        self._planner.plan(self._tables, self._sharders)
        assert self._planner.report is not None
        return placed_options(self._planner.report.best)

    def rate(self, placed: Placed) -> tuple[float, bool]:
        """Milliseconds of the busiest rank, and whether every rank has room."""
        space = {o.name: o for o in self._enumerator.enumerate(self._tables, self._sharders)}
        options = [
            dataclasses.replace(
                space[name],
                sharding_type=kind,
                compute_kernel=kernel,
                partition_by=None,
                shards=[Shard(list(size), list(offset)) for offset, size, _ in shards],
            )
            for name, (kind, kernel, shards) in placed.items()
        ]
        self._enumerator.populate_estimates(options)
        options = [
            option.placed([rank for _, _, rank in placed[option.name][2]]) for option in options
        ]
        room = self._topology.devices[0].storage.hbm * (1 - RESERVED)
        used = per_rank(options, self._topology.world_size, lambda shard: shard.used.hbm)
        return NoopPerfModel(self._topology).rate(options), max(used) <= room


class TorchRec(Side):
    """TorchRec's planner."""

    name = "TorchRec"

    def __init__(self, model: Model) -> None:
        def part(path: str) -> Any:
            return importlib.import_module(f"torchrec.{path}")

        planning = "distributed.planner"
        types, configs = part(f"{planning}.types"), part("modules.embedding_configs")
        self._types = types
        self._tables = part("modules.embedding_modules").EmbeddingBagCollection(
            tables=[
                configs.EmbeddingBagConfig(
                    num_embeddings=rows,
                    embedding_dim=columns,
                    name=f"t{i}",
                    feature_names=[f"f{i}"],
                )
                for i, (rows, columns, _) in enumerate(model.tables)
            ],
            device=torch.device("meta"),
        )
        self._sharders = [part("distributed.embeddingbag").EmbeddingBagCollectionSharder()]
        self._topology = types.Topology(
            world_size=model.ranks,
            compute_device=model.device,
            local_world_size=min(8, model.ranks),
            **model.memory(),
            **{name: value / 1e3 for name, value in model.bandwidths.items()},  # bytes per ms
        )
        constraints = {
            f"t{i}": types.ParameterConstraints(pooling_factors=[ids], **allowed(model))
            for i, (_, _, ids) in enumerate(model.tables)
        }
        self._enumerator = part(f"{planning}.enumerators").EmbeddingEnumerator(
            topology=self._topology, batch_size=model.batch_size, constraints=constraints
        )
        self._perf_model = part(f"{planning}.perf_models").NoopPerfModel(self._topology)
        self._planner = part(f"{planning}.planners").EmbeddingShardingPlanner(
            topology=self._topology,
            batch_size=model.batch_size,
            storage_reservation=part(
                f"{planning}.storage_reservations"
            ).FixedPercentageStorageReservation(RESERVED),
            constraints=constraints,
            stats=part(f"{planning}.stats").NoopEmbeddingStats(),
        )

    def plan(self) -> Placed:
        """The planner's own plan."""
        self._planner.plan(self._tables, self._sharders)
        return placed_options(self._planner._best_plan)  # noqa: SLF001 - TorchRec shows it to no one

    def rate(self, placed: Placed) -> tuple[float, bool]:
        """Milliseconds of the busiest rank, and whether every rank has room."""
        space = {o.name: o for o in self._enumerator.enumerate(self._tables, self._sharders)}
        options, used = [], [0] * self._topology.world_size
        for name, (kind, kernel, shards) in placed.items():
            option = copy.copy(space[name])
            option.sharding_type, option.compute_kernel = kind, kernel
            option.shards = [
                self._types.Shard(size=list(size), offset=list(offset))
                for offset, size, _ in shards
            ]
            options.append(option)
        self._enumerator.populate_estimates(options)
        for option in options:
            for shard, (_, _, rank) in zip(option.shards, placed[option.name][2], strict=True):
                shard.rank = rank
                used[rank] += shard.storage.hbm
        room = self._topology.devices[0].storage.hbm * (1 - RESERVED)
        return float(self._perf_model.rate(options)), max(used) <= room


def placed_options(options: list[Any]) -> Placed:
    """Places in a form that both libraries' options can be made of."""
    return {
        option.name: (
            option.sharding_type,
            option.compute_kernel,
            [(list(shard.offset), list(shard.size), shard.rank) for shard in option.shards],
        )
        for option in options
    }


def sharding_plan(placed: Placed, model: Model) -> ShardingPlan:
    """A plan for a `DistributedModelParallel` of this library, whose module is the collection itself."""

    def where(kind: str, kernel: str, shards: list[tuple[list[int], list[int], int]]) -> Any:
        metadata = [
            ShardMetadata(
                shard_offsets=offset,
                shard_sizes=size,
                placement=placement(model.device, rank, min(8, model.ranks)),
            )
            for offset, size, rank in shards
        ]
        return ParameterSharding(
            sharding_type=kind,
            compute_kernel=kernel,
            ranks=[rank for _, _, rank in shards],
            sharding_spec=None if kind == "data_parallel" else EnumerableShardingSpec(metadata),
        )

    tables = {name: where(*each) for name, each in placed.items()}
    return ShardingPlan(plan={"": EmbeddingModuleShardingPlan(tables)})


def verdict(ours: tuple[float, bool], theirs: tuple[float, bool]) -> str:
    """How this planner's plan does beside TorchRec's, by one side's estimates."""
    if not ours[1] or not theirs[1]:
        return (
            "neither fits"
            if ours[1] == theirs[1]
            else f"only {'ours' if ours[1] else 'theirs'} fits"
        )
    ratio = ours[0] / theirs[0]
    if abs(ratio - 1) <= EQUAL:
        return "equal"
    return "better" if ratio < 1 else "worse"


def compared(number: int, seed: int) -> dict[str, Any]:
    """What both sides make of one model."""
    model = random_model(seed * 1000 + number, may_leave_hbm=number % 2 == 1)
    sides: list[Side] = [Tessera(model), TorchRec(model)]
    plans: dict[str, Placed | None] = {}
    seconds: dict[str, float] = {}
    for side in sides:
        started = time.perf_counter()
        try:
            plans[side.name] = side.plan()
        except Exception as error:
            if not isinstance(error, PlannerError) and type(error).__name__ != "PlannerError":
                raise
            plans[side.name] = None
        seconds[side.name] = time.perf_counter() - started
    found: dict[str, Any] = {
        "model": number,
        "tables": len(model.tables),
        "ranks": model.ranks,
        "may_leave_hbm": model.may_leave_hbm,
        "seconds": seconds,
    }
    ours, theirs = plans["Tessera"], plans["TorchRec"]
    if ours is None or theirs is None:
        planned = [name for name, plan in plans.items() if plan is not None]
        return {**found, "planned": planned}
    return {
        **found,
        "same_ways": sum(ours[name][:2] == theirs[name][:2] for name in ours) / len(ours),
        "by": {
            side.name: {
                "verdict": verdict(side.rate(ours), side.rate(theirs)),
                "ratio": side.rate(ours)[0] / side.rate(theirs)[0],
            }
            for side in sides
        },
    }


def summary(found: list[dict[str, Any]]) -> str:
    """The table of docs/planner.md."""
    lines = [
        (
            "| models | by the estimates of | equal | better | worse | else | ratio of times, median "
            "(least to most) |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for leaves, label in ((False, "`fused` only"), (True, "all kernels")):
        part = [one for one in found if one["may_leave_hbm"] == leaves]
        both = [one for one in part if "by" in one]
        alone = Counter(" and ".join(one["planned"]) or "none" for one in part if "by" not in one)
        for side in ("Tessera", "TorchRec"):
            counts = Counter(one["by"][side]["verdict"] for one in both)
            ratios = [
                one["by"][side]["ratio"]
                for one in both
                if one["by"][side]["verdict"] in {"equal", "better", "worse"}
            ]
            rest = [
                f"{count} {name}"
                for name, count in sorted(counts.items())
                if name not in {"equal", "better", "worse"}
            ]
            rest += [f"{count} planned by {name} alone" for name, count in sorted(alone.items())]
            span = (
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                if ratios
                else "-"
            )
            lines.append(
                f"| {len(part)}, {label} | {side} | {counts['equal']} | {counts['better']} | "
                f"{counts['worse']} | {', '.join(rest) or '-'} | {span} |"
            )
    for side in ("Tessera", "TorchRec"):
        times = [one["seconds"][side] for one in found]
        lines.append(
            f"\n{side} planned in {statistics.median(times):.2f} s at the median, {max(times):.2f} s at most."
        )
    return "\n".join(lines)


def main() -> None:
    """Compare, print the summary, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=50, help="random models; default 50")
    parser.add_argument("--seed", type=int, default=0, help="of the models; default 0")
    parser.add_argument("--out", type=Path, help="a JSON file for every model's figures")
    flags = parser.parse_args()
    if importlib.util.find_spec("torchrec") is None:
        sys.exit(
            "TorchRec is not installed here; pip install torchrec, in an environment of its own"
        )
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    found = []
    for number in range(flags.models):
        found.append(compared(number, flags.seed))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if flags.out:
        flags.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(summary(found))


if __name__ == "__main__":
    main()
