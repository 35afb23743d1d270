"""Table-wise: a table lives whole on one rank.

* How ids travel: each rank sends a feature's bags to the rank that holds its table
  (all-to-all), and so receives the bags of all ranks for the features of its own tables.
* Which rows are here: all rows of some tables.
* How vectors travel back: pooled vectors go to the rank whose sample they are of (all-to-all).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
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
    PlannedSharding,
    PooledSharding,
)
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.distributed.travel.pooled_vectors import (
    PooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsAllToAll,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class TwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Features to the ranks that hold their tables.

    Args:
        pg: the ranks.
        features_per_rank: how many features each rank looks up; they come in the ranks' order.
    """

    def __init__(self, pg: dist.ProcessGroup, features_per_rank: list[int]) -> None:
        super().__init__()
        self._dist = KJTAllToAll(pg=pg, splits=features_per_rank)

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send ``[sum of features_per_rank]`` features."""
        return self._dist(sparse_features)  # type: ignore[no-any-return] # nn.Module's call is untyped


class TwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Pooled vectors back to the ranks of their samples.

    Args:
        pg: the ranks.
        dims_per_rank: columns of each feature that each rank looks up.
        device: where this rank computes.
        codecs: how vectors are written for the network.
        order: of the columns that arrive; None: rank by rank.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dims_per_rank: list[list[int]],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
        order: ColumnOrder | None = None,
    ) -> None:
        super().__init__()
        self._pg, self._device, self._codecs = pg, device, codecs
        self._dims_per_rank = dims_per_rank
        self._dist = PooledEmbeddingsAllToAll(
            pg=pg,
            dim_sum_per_rank=[sum(dims) for dims in dims_per_rank],
            device=device,
            codecs=codecs,
            order=order,
        )
        self._variable_dist: VariableBatchPooledEmbeddingsAllToAll | None = None

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[sum of B, columns here]``; the wait gives ``[B, all columns]``.

        Where the batch varies per feature both are flat: rank by rank, feature by feature.
        """
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            if self._variable_dist is None:
                self._variable_dist = VariableBatchPooledEmbeddingsAllToAll(
                    pg=self._pg,
                    emb_dim_per_rank_per_feature=self._dims_per_rank,
                    device=self._device,
                    codecs=self._codecs,
                )
            return self._variable_dist(  # type: ignore[no-any-return] # nn.Module's call is untyped
                local_embs,
                batch_size_per_rank_per_feature=sharding_ctx.batch_size_per_rank_per_feature,
                batch_size_per_feature_pre_a2a=sharding_ctx.batch_size_per_feature_pre_a2a,
            )
        sizes = None if sharding_ctx is None else sharding_ctx.batch_size_per_rank
        return self._dist(local_embs, batch_size_per_rank=sizes)  # type: ignore[no-any-return] # nn.Module's call is untyped


class BaseTwEmbeddingSharding(PlannedSharding[C, T, W]):
    """What pooled and unpooled tables have in common."""

    sharding_type = ShardingType.TABLE_WISE

    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel."""
        del device
        return TwSparseFeaturesDist(pg, self.features_per_sender())


class TwPooledEmbeddingSharding(
    PooledSharding, BaseTwEmbeddingSharding[EmbeddingShardingContext, Tensor, Tensor]
):
    """Table-wise sharding of pooled tables."""

    def _output_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back."""
        return TwPooledEmbeddingDist(
            pg,
            self.dims_per_sender(),
            device,
            self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL),
            self.order,
        )
