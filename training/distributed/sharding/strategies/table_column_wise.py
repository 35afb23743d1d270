"""Table-column-wise: blocks of a table's columns live on the ranks of one node.

* How ids travel, which rows are here, how vectors travel back: as column-wise; the plan keeps
  a table's blocks on ranks that are near one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut, column_blocks
from tessera.training.distributed.sharding import by_hand
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import column_wise


def table_column_wise(
    host_index: int,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> by_hand.ParameterShardingGenerator:
    """Blocks of columns live on the ranks of one node.

    Args:
        host_index: the node.
        size_per_rank: columns of each of its ranks, from its first on; None: equal blocks.
        compute_kernel: None: see `by_hand.placed_by`.
    """

    def shards(table: TableToCut) -> by_hand.Shards:
        first = by_hand.ranks_of_node("host_index", host_index, table)[0]
        blocks = table.local_size if size_per_rank is None else len(size_per_rank)
        return by_hand.column_shards(table, range(first, first + blocks), size_per_rank)

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    replace(
        column_wise.STRATEGY,
        name=ShardingType.TABLE_COLUMN_WISE.value,
        short_name="TWCW",
        cut=lambda table: column_blocks(table.rows, table.widths(table.local_size)),
        by_hand=table_column_wise,
        placed=PartitionByType.HOST,
        least_ranks=1,
        least_hosts=2,
        preference=3,
    )
)
