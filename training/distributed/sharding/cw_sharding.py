"""Column-wise: blocks of a table's columns live on different ranks, each as a table of its own.

* How ids travel: as table-wise, once per block: a bag goes to every rank that has a block.
* Which rows are here: all rows, some columns.
* How vectors travel back: as table-wise.  A vector's parts arrive apart; the collection puts
  them side by side when it puts all columns in its own order.
"""

from __future__ import annotations

from torch import Tensor

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.embedding_sharding import (
    C,
    EmbeddingShardingContext,
    T,
    W,
)
from tessera.training.distributed.sharding.tw_sharding import (
    BaseTwEmbeddingSharding,
    TwPooledEmbeddingSharding,
)


class BaseCwEmbeddingSharding(BaseTwEmbeddingSharding[C, T, W]):
    """What pooled and unpooled tables have in common."""

    sharding_type = ShardingType.COLUMN_WISE


class CwPooledEmbeddingSharding(
    TwPooledEmbeddingSharding, BaseCwEmbeddingSharding[EmbeddingShardingContext, Tensor, Tensor]
):
    """Column-wise sharding of pooled tables."""

    sharding_type = ShardingType.COLUMN_WISE
