"""Data-parallel: every rank holds every table whole.

* How ids travel: they do not.
* Which rows are here: all.
* How vectors travel back: they are here already.  What travels is the gradients of the tables:
  ``DistributedDataParallel`` averages them over the ranks, and an ordinary optimizer applies them.
"""

from __future__ import annotations

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.by_hand import (
    ParameterShardingGenerator,
    one_per_rank,
    placed_by,
)
from tessera.training.distributed.sharding.costs import replicated
from tessera.training.distributed.sharding.ids import ids_stay
from tessera.training.distributed.sharding.layout import own_rank
from tessera.training.distributed.sharding.pooled_vectors import vectors_stay
from tessera.training.distributed.sharding.registry import (
    PartitionByType,
    ShardingStrategy,
    dense_kernels,
    register,
)
from tessera.training.distributed.sharding.sequence_sharding import own_vectors_stay

NAME = ShardingType.DATA_PARALLEL.value


def data_parallel(compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Every rank holds the whole table; gradients are averaged."""
    return placed_by(NAME, compute_kernel, lambda table: one_per_rank(STRATEGY.cut(table)))


STRATEGY = register(
    ShardingStrategy(
        name=NAME,
        short_name="DP",
        cut=lambda table: [table.whole] * table.world_size,
        by_hand=data_parallel,
        placed=PartitionByType.UNIFORM,
        teams=own_rank,
        ids=ids_stay,
        pooled=vectors_stay,
        unpooled=own_vectors_stay,
        traffic=replicated,
        kernels=dense_kernels,
        replicated=True,
        preference=0,
    )
)
