"""Column-wise, unpooled: blocks of a table's columns live on different ranks.

* How ids travel: as table-wise, once per block of columns.
* Which rows are here: all rows, some columns.
* How vectors travel back: as table-wise; the collection puts a vector's parts side by side.
  Where blocks differ in width, the narrower ones are filled up on their way.
"""

from __future__ import annotations

from torch import Tensor

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.cw_sharding import BaseCwEmbeddingSharding
from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceSharding,
    SequenceShardingContext,
)


class CwSequenceEmbeddingSharding(
    SequenceSharding, BaseCwEmbeddingSharding[SequenceShardingContext, Tensor, Tensor]
):
    """Column-wise sharding of unpooled tables."""


class TwCwSequenceEmbeddingSharding(CwSequenceEmbeddingSharding):
    """Column-wise sharding of unpooled tables on the ranks of one node."""

    sharding_type = ShardingType.TABLE_COLUMN_WISE
