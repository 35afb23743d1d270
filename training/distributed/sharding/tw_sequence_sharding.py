"""Table-wise, unpooled: a table lives whole on one rank.

* How ids travel: to the rank that holds their feature's table (all-to-all).
* Which rows are here: all rows of some tables.
* How vectors travel back: the vector of each id to the rank that asked (all-to-all).
"""

from __future__ import annotations

from torch import Tensor

from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceSharding,
    SequenceShardingContext,
)
from tessera.training.distributed.sharding.tw_sharding import BaseTwEmbeddingSharding


class TwSequenceEmbeddingSharding(
    SequenceSharding, BaseTwEmbeddingSharding[SequenceShardingContext, Tensor, Tensor]
):
    """Table-wise sharding of unpooled tables."""
