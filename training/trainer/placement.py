"""Which rank holds which rows of a run's tables."""

from __future__ import annotations

from tessera.training.config import ExperimentConfig
from tessera.training.distributed.collections.pooled import EmbeddingBagCollectionSharder
from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.models.ranking import RankingModel
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.trainer.ranks import Ranks

# What leaves a row whole: the arithmetic is then that of one rank, whatever the plan.
_WHOLE_ROWS = ["table_wise", "row_wise", "table_row_wise"]
_MIN_COLUMNS = 4
"""Fewest columns of a column shard: below, rows are no multiples of what FBGEMM takes."""


def plan_for(
    model: RankingModel,
    sharder: EmbeddingBagCollectionSharder,
    config: ExperimentConfig,
    ranks: Ranks,
) -> ShardingPlan | None:
    """The plan of ``train.sharding``; None with one rank, which holds everything.

    Every rank calls it.

    Raises:
        UserError: the tables do not fit; the message says which and what would help.
    """
    if ranks.alone:
        return None
    # Planning and what it needs take a while to import.
    from torch import distributed as dist  # noqa: PLC0415

    from tessera.training.distributed.planner import (  # noqa: PLC0415
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )

    wanted = config.train.sharding
    constraint = ParameterConstraints(
        sharding_types=_WHOLE_ROWS if wanted == "auto" else [wanted],
        compute_kernels=["fused"],
        min_partition=_MIN_COLUMNS,
    )
    tables = [
        table.name
        for part in model.modules()
        if isinstance(part, EmbeddingBagCollection)
        for table in part.embedding_bag_configs()
    ]
    planner = EmbeddingShardingPlanner(
        Topology(world_size=ranks.world_size, compute_device=config.train.device),
        batch_size=max(config.train.batch_size // ranks.world_size, 1),
        constraints=dict.fromkeys(tables, constraint),
    )
    return planner.collective_plan(model, [sharder], dist.group.WORLD)
