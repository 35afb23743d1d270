"""Data-parallel, unpooled: every rank holds every table whole.

* How ids travel: they do not.
* Which rows are here: all.
* How vectors travel back: they are here already; what travels is the tables' gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.distributed.sharding.dp_sharding import BaseDpEmbeddingSharding
from tessera.training.distributed.sharding.embedding_sharding import BaseEmbeddingDist
from tessera.training.distributed.sharding.sequence_sharding import (
    LocalSequenceEmbeddingDist,
    SequenceSharding,
    SequenceShardingContext,
)


class DpSequenceEmbeddingSharding(
    SequenceSharding, BaseDpEmbeddingSharding[SequenceShardingContext, Tensor, Tensor]
):
    """Data-parallel unpooled tables."""

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]:
        """How vectors travel back."""
        del device
        return LocalSequenceEmbeddingDist(self.dims_per_rank()[self._rank])
