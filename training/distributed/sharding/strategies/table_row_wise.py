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
from tessera.training.distributed.sharding.by_hand import (
    ParameterShardingGenerator,
    Shards,
    placed_by,
    ranks_of_node,
)
from tessera.training.distributed.sharding.costs import summed_on_hosts
from tessera.training.distributed.sharding.layout import nodes
from tessera.training.distributed.sharding.pooled_vectors import node_sums_to_samples
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import row_wise

NAME = ShardingType.TABLE_ROW_WISE.value


def table_row_wise(
    host_index: int, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Blocks of rows live on the ranks of one node."""

    def shards(table: TableToCut) -> Shards:
        ranks = ranks_of_node("host_index", host_index, table)
        blocks = row_blocks(even_rows(table.rows, table.local_size), table.columns)
        return list(zip(blocks, ranks, strict=True))

    return placed_by(NAME, compute_kernel, shards)


STRATEGY = register(
    replace(
        row_wise.STRATEGY,
        name=NAME,
        short_name="TWRW",
        cut=lambda table: row_blocks(even_rows(table.rows, table.local_size), table.columns),
        by_hand=table_row_wise,
        placed=PartitionByType.HOST,
        teams=nodes,
        pooled=node_sums_to_samples,
        traffic=summed_on_hosts,
        least_ranks=1,
        least_hosts=2,
        preference=5,
    )
)
