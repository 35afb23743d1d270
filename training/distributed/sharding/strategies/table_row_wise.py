"""Table-row-wise: a table lives on one node, each of its ranks holds a block of the rows.

* How ids travel: each id to the rank that holds its row (one all-to-all over all ranks); the
  ids of a feature go to one node only.
* Which rows are here: one block of each of the node's tables.
* How vectors travel back: within the node, where links are fast, the ranks' parts are added up
  (reduce-scatter); then the nodes exchange sums (all-to-all).  The vectors of single ids go
  straight to the rank that asked: nothing is added up, so nodes need no step of their own.
"""

from __future__ import annotations

from dataclasses import replace

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut, even_rows, row_blocks
from tessera.training.distributed.sharding import by_hand, costs, pooled_vectors
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import row_wise


def table_row_wise(
    host_index: int, compute_kernel: str | None = None
) -> by_hand.ParameterShardingGenerator:
    """Blocks of rows live on the ranks of one node."""

    def shards(table: TableToCut) -> by_hand.Shards:
        ranks = by_hand.ranks_of_node("host_index", host_index, table)
        return list(zip(STRATEGY.cut(table), ranks, strict=True))

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    replace(
        row_wise.STRATEGY,
        name=ShardingType.TABLE_ROW_WISE.value,
        short_name="TWRW",
        cut=lambda table: row_blocks(even_rows(table.rows, table.local_size), table.columns),
        by_hand=table_row_wise,
        placed=PartitionByType.HOST,
        teams=lambda world: [
            range(first, first + world.local_size)
            for first in range(0, world.size, world.local_size)
        ],
        pooled=pooled_vectors.node_sums_to_samples,
        traffic=costs.summed_on_hosts,
        least_ranks=1,
        least_hosts=2,
        preference=5,
    )
)
