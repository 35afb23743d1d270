"""Data-parallel: every rank holds every table whole.

* How ids travel: they do not.
* Which rows are here: all.
* How vectors travel back: they are here already.  What travels is the gradients of the tables:
  ``DistributedDataParallel`` averages them over the ranks, and an ordinary optimizer applies them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    C,
    EmbeddingShardingContext,
    T,
    W,
)
from tessera.training.distributed.sharding.planned import (
    LocalEmbeddingDist,
    LocalSparseFeaturesDist,
    PlannedSharding,
    PooledSharding,
    in_order,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class DpSparseFeaturesDist(LocalSparseFeaturesDist):
    """Ids stay."""


class DpPooledEmbeddingDist(LocalEmbeddingDist):
    """Vectors stay."""


class BaseDpEmbeddingSharding(PlannedSharding[C, T, W]):
    """What pooled and unpooled tables have in common."""

    sharding_type = ShardingType.DATA_PARALLEL

    def senders(self) -> list[int]:
        """Each rank looks its own samples up itself."""
        return [self._rank]

    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel."""
        del pg, device
        return DpSparseFeaturesDist()


class DpPooledEmbeddingSharding(
    PooledSharding, BaseDpEmbeddingSharding[EmbeddingShardingContext, Tensor, Tensor]
):
    """Data-parallel pooled tables."""

    # The gradients of ids' weights are those of this rank's samples, as a replica's are.
    scale_weight_gradients = False

    def _output_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back."""
        del pg, device
        return in_order(DpPooledEmbeddingDist(), self.order)
