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
from tessera.training.distributed.sharding.by_hand import (
    ParameterShardingGenerator,
    Shards,
    column_shards,
    placed_by,
    ranks_of_node,
)
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import table_row_wise

NAME = ShardingType.GRID_SHARD.value


def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Each node of ``host_indexes`` holds a block of columns, cut into rows among its ranks."""

    def shards(table: TableToCut) -> Shards:
        columns = column_shards(table, host_indexes, None)
        widths = [width for ((_, width), _), _ in columns]
        ranks = [
            rank for host in host_indexes for rank in ranks_of_node("host_indexes", host, table)
        ]
        return list(zip(grid_blocks(table.rows, widths, table.local_size), ranks, strict=True))

    return placed_by(NAME, compute_kernel, shards)


STRATEGY = register(
    replace(
        table_row_wise.STRATEGY,
        name=NAME,
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
