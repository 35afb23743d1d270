"""Table-wise: a table lives whole on one rank.

* How ids travel: each rank sends a feature's bags to the rank that holds its table
  (all-to-all), and so receives the bags of all ranks for the features of its own tables.
* Which rows are here: all rows of some tables.
* How vectors travel back: pooled vectors to the rank whose sample they are of, and the vectors of
  single ids to the rank that asked (all-to-all).
"""

from __future__ import annotations

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut
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
    register,
)


def table_wise(rank: int, compute_kernel: str | None = None) -> by_hand.ParameterShardingGenerator:
    """The whole table lives on ``rank``."""

    def shards(table: TableToCut) -> by_hand.Shards:
        by_hand.check_rank("rank", rank, table.world_size)
        return [(table.whole, rank)]

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    ShardingStrategy(
        name=ShardingType.TABLE_WISE.value,
        short_name="TW",
        cut=lambda table: [table.whole],
        by_hand=table_wise,
        placed=PartitionByType.DEVICE,
        teams=lambda world: [[rank] for rank in range(world.size)],
        ids=ids.ids_to_tables,
        pooled=pooled_vectors.vectors_to_samples,
        unpooled=sequence_sharding.vectors_to_senders,
        traffic=costs.to_the_holders,
        preference=1,
    )
)
