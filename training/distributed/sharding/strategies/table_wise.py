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
from tessera.training.distributed.sharding.by_hand import (
    ParameterShardingGenerator,
    Shards,
    check_rank,
    placed_by,
)
from tessera.training.distributed.sharding.costs import to_the_holders
from tessera.training.distributed.sharding.ids import ids_to_tables
from tessera.training.distributed.sharding.layout import each_rank
from tessera.training.distributed.sharding.pooled_vectors import vectors_to_samples
from tessera.training.distributed.sharding.registry import (
    PartitionByType,
    ShardingStrategy,
    register,
)
from tessera.training.distributed.sharding.sequence_sharding import vectors_to_senders

NAME = ShardingType.TABLE_WISE.value


def table_wise(rank: int, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table lives on ``rank``."""

    def shards(table: TableToCut) -> Shards:
        check_rank("rank", rank, table.world_size)
        return [(table.whole, rank)]

    return placed_by(NAME, compute_kernel, shards)


STRATEGY = register(
    ShardingStrategy(
        name=NAME,
        short_name="TW",
        cut=lambda table: [table.whole],
        by_hand=table_wise,
        placed=PartitionByType.DEVICE,
        teams=each_rank,
        ids=ids_to_tables,
        pooled=vectors_to_samples,
        unpooled=vectors_to_senders,
        traffic=to_the_holders,
        preference=1,
    )
)
