"""Grid: a table's columns are cut among nodes, and each node's columns by rows among its ranks.

* How ids travel: as table-row-wise, once per block of columns: a bag goes to every node that has
  one.
* Which rows are here: one block of rows of one block of columns.
* How vectors travel back: as table-row-wise; the collection puts a vector's parts side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut, grid_blocks
from tessera.training.distributed.sharding import by_hand
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import table_row_wise


def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None
) -> by_hand.ParameterShardingGenerator:
    """Each node of ``host_indexes`` holds a block of columns, cut into rows among its ranks."""

    def shards(table: TableToCut) -> by_hand.Shards:
        columns = by_hand.column_shards(table, host_indexes, None)
        widths = [width for ((_, width), _), _ in columns]
        ranks = [
            rank
            for host in host_indexes
            for rank in by_hand.ranks_of_node("host_indexes", host, table)
        ]
        return list(zip(grid_blocks(table.rows, widths, table.local_size), ranks, strict=True))

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    replace(
        table_row_wise.STRATEGY,
        name=ShardingType.GRID_SHARD.value,
        short_name="GRID",
        cut=lambda table: grid_blocks(
            table.rows, table.widths(table.world_size // table.local_size), table.local_size
        ),
        by_hand=grid_shard,
        placed=PartitionByType.MULTI_HOST,
        splits_rows=True,
        preference=6,
    )
)
