"""Which rank holds which rows of a run's tables, and in which memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tessera.training.config import ExperimentConfig
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.sharding.registry import strategies, strategy_of
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.trainer.ranks import Ranks

if TYPE_CHECKING:
    from tessera.training.distributed.planner.hardware import Topology

_MIN_COLUMNS = 4
"""Fewest columns of a column shard: below, rows are not multiples of what FBGEMM takes."""


def caches_rows(config: ExperimentConfig) -> bool:
    """Whether tables lie in host memory, behind a cache of rows on the GPU."""
    return config.train.pipeline == "prefetch" and config.train.device == "cuda"


def plan_for(
    model: nn.Module,
    sharders: Sequence[CollectionSharder[Any, Any]],
    config: ExperimentConfig,
    ranks: Ranks,
    device: torch.device,
) -> ShardingPlan | None:
    """The plan of ``train.sharding``; None with one rank that holds every table on its device.

    Every rank calls it.

    Raises:
        UserError: an unknown strategy; or the tables do not fit: the message says which and what
            would help.
    """
    allowed = _strategies(config.train.sharding)
    if ranks.alone and not caches_rows(config):
        return None
    # Planning and what it needs take a while to import.
    from torch import distributed as dist  # noqa: PLC0415

    from tessera.training.distributed.planner.planners import EmbeddingShardingPlanner  # noqa: PLC0415
    from tessera.training.distributed.planner.types import ParameterConstraints  # noqa: PLC0415

    constraint = ParameterConstraints(
        sharding_types=allowed,
        compute_kernels=["fused_uvm_caching" if caches_rows(config) else "fused"],
        min_partition=_MIN_COLUMNS,
    )
    tables = [
        table.name
        for part in model.modules()
        for table in (
            part.embedding_bag_configs()
            if isinstance(part, EmbeddingBagCollection)
            else part.embedding_configs()
            if isinstance(part, EmbeddingCollection)
            else ()
        )
    ]
    planner = EmbeddingShardingPlanner(
        _topology(ranks, device),
        batch_size=max(config.train.batch_size // ranks.world_size, 1),
        constraints=dict.fromkeys(tables, constraint),
    )
    if ranks.alone:
        return planner.plan(model, list(sharders))
    return planner.collective_plan(model, list(sharders), dist.group.WORLD)


def _strategies(sharding: str) -> list[str]:
    """The names of the strategies that ``train.sharding`` allows."""
    if sharding != "auto":
        return [strategy_of(sharding, "train.sharding").name]
    # What leaves a row whole: the arithmetic is then that of one rank, whatever the plan.
    return [own.name for own in strategies() if not (own.splits_rows or own.replicated)]


def _topology(ranks: Ranks, device: torch.device) -> Topology:
    """The ranks, on GPUs with the bandwidths that are measured here and now."""
    from tessera.training.distributed.planner.hardware import Topology  # noqa: PLC0415 - see above
    from tessera.training.distributed.planner.measure import measure_bandwidths  # noqa: PLC0415 - see above

    if device.type == "cpu":
        return Topology(world_size=ranks.world_size, compute_device="cpu")
    measured = measure_bandwidths(device)
    return Topology(
        world_size=ranks.world_size,
        compute_device=device.type,
        hbm_mem_bw=measured.mem_bw,
        intra_host_bw=measured.intra_host_bw,
    )
