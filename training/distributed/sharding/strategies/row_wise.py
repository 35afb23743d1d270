"""Row-wise: every rank holds a block of a table's rows.

* How ids travel: each id to the rank that holds its row (all-to-all).  A bag's ids may go to
  several ranks, and every rank gets a part of every bag, often an empty one.
* Which rows are here: one block of every table.  Blocks may differ in size and may be empty.
* How vectors travel back: each rank pools what it has of every bag; the parts are added up on
  their way to the rank whose sample it is (reduce-scatter).  A mean is a sum that is divided
  after that, by the size of the whole bag.  The vectors of single ids go to the rank that asked
  (all-to-all), where the sorting is undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut, even_rows, row_blocks
from tessera.training.distributed.sharding import by_hand, ids, pooled_vectors
from tessera.training.distributed.sharding.registry import PartitionByType, register
from tessera.training.distributed.sharding.strategies import table_wise


def row_wise(
    sizes: Sequence[int] | None = None, compute_kernel: str | None = None
) -> by_hand.ParameterShardingGenerator:
    """Every rank holds a block of rows.

    Args:
        sizes: rows of each rank; None: ``ceil(rows / ranks)`` each, less or none on the last.
        compute_kernel: None: see `by_hand.placed_by`.
    """

    def shards(table: TableToCut) -> by_hand.Shards:
        rows = even_rows(table.rows, table.world_size) if sizes is None else sizes
        if len(rows) != table.world_size or sum(rows) != table.rows or min(rows) < 0:
            raise ValueError(
                f"sizes is {list(rows)}; give {table.world_size} numbers that add up to the "
                f"table's {table.rows} rows"
            )
        return by_hand.one_per_rank(row_blocks(rows, table.columns))

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    replace(
        table_wise.STRATEGY,
        name=ShardingType.ROW_WISE.value,
        short_name="RW",
        cut=lambda table: row_blocks(even_rows(table.rows, table.world_size), table.columns),
        by_hand=row_wise,
        placed=PartitionByType.UNIFORM,
        teams=lambda world: [range(world.size)],
        ids=ids.ids_to_rows,
        pooled=pooled_vectors.sums_to_samples,
        splits_bags=True,
        least_ranks=2,
        preference=4,
    )
)
