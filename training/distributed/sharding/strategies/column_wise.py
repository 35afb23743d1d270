"""Column-wise: blocks of a table's columns live on different ranks, each as a table of its own.

* How ids travel: as table-wise, once per block: a bag goes to every rank that has a block.
* Which rows are here: all rows, some columns.
* How vectors travel back: as table-wise.  A vector's parts come apart; the collection puts them
  side by side when it puts all columns in its own order.  Where the blocks of unpooled tables
  differ in width, the narrower ones are filled up on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import TableToCut, column_blocks
from tessera.training.distributed.sharding import by_hand
from tessera.training.distributed.sharding.registry import register
from tessera.training.distributed.sharding.strategies import table_wise


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> by_hand.ParameterShardingGenerator:
    """Blocks of columns live on ``ranks``.

    Args:
        ranks: the rank of each block; a rank may hold several.  None: the first ranks, one block
            each.
        size_per_rank: columns of each block; None: equal blocks.
        compute_kernel: None: see `by_hand.placed_by`.

    Raises:
        ValueError: both are None.
    """
    if ranks is None:
        if size_per_rank is None:
            raise ValueError("ranks and size_per_rank are both None; give at least one")
        ranks = range(len(size_per_rank))
    wanted = list(ranks)

    def shards(table: TableToCut) -> by_hand.Shards:
        for rank in wanted:
            by_hand.check_rank("ranks", rank, table.world_size)
        return by_hand.column_shards(table, wanted, size_per_rank)

    return by_hand.placed_by(STRATEGY, compute_kernel, shards)


STRATEGY = register(
    replace(
        table_wise.STRATEGY,
        name=ShardingType.COLUMN_WISE.value,
        short_name="CW",
        cut=lambda table: column_blocks(table.rows, table.widths(table.world_size)),
        by_hand=column_wise,
        splits_rows=True,
        least_ranks=2,
        preference=2,
    )
)
