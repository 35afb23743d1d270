"""Row-wise, unpooled: every rank holds a block of a table's rows.

* How ids travel: sorted by the rank that holds their row, then to it (all-to-all).
* Which rows are here: one block of every table.
* How vectors travel back: the vector of each id to the rank that asked (all-to-all), where the
  sorting is undone.
"""

from __future__ import annotations

from torch import Tensor

from tessera.training.distributed.sharding.rw_sharding import BaseRwEmbeddingSharding
from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceSharding,
    SequenceShardingContext,
)


class RwSequenceEmbeddingSharding(
    SequenceSharding, BaseRwEmbeddingSharding[SequenceShardingContext, Tensor, Tensor]
):
    """Row-wise sharding of unpooled tables."""

    is_sequence = True
