"""Data-parallel: every rank holds every table whole.

* How ids travel: they do not.
* Which rows are here: all.
* How vectors travel back: they are here already.  What travels is the gradients of the tables:
  ``DistributedDataParallel`` averages them over the ranks, and an ordinary optimizer applies them.
"""

from __future__ import annotations

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding import (
    by_hand,
    costs,
    ids,
    pooled_vectors,
    sequence_sharding,
)
from tessera.training.distributed.sharding.registry import (
    PartitionByType,
    ShardingStrategy,
    dense_kernels,
    register,
)


def data_parallel(compute_kernel: str | None = None) -> by_hand.ParameterShardingGenerator:
    """Every rank holds the whole table; gradients are averaged."""
    return by_hand.placed_by(
        STRATEGY, compute_kernel, lambda table: by_hand.one_per_rank(STRATEGY.cut(table))
    )


STRATEGY = register(
    ShardingStrategy(
        name=ShardingType.DATA_PARALLEL.value,
        short_name="DP",
        cut=lambda table: [table.whole] * table.world_size,
        by_hand=data_parallel,
        placed=PartitionByType.UNIFORM,
        teams=lambda world: [[world.rank]],
        ids=ids.ids_stay,
        pooled=pooled_vectors.vectors_stay,
        unpooled=sequence_sharding.own_vectors_stay,
        traffic=costs.replicated,
        kernels=dense_kernels,
        replicated=True,
        preference=0,
    )
)
