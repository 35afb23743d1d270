"""Row-wise: every rank holds a block of a table's rows.

* How ids travel: each id to the rank that holds its row (all-to-all).  A bag's ids may go to
  several ranks, and every rank gets a part of every bag, often an empty one.
* Which rows are here: one block of every table.  Blocks may differ in size and may be empty.
* How vectors travel back: each rank pools what it has of every bag; the parts are added up on
  their way to the rank whose sample it is (reduce-scatter).  A mean is a sum that is divided
  after that, by the size of the whole bag.

Legend: ``W`` ranks, ``F`` features.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
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
    in_order,
)
from tessera.training.distributed.travel.bucketize import bucketize_kjt_before_all2all
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.distributed.travel.pooled_vectors import (
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class RowBuckets:
    """Where each id's row is: the blocks of each feature's table.

    Args:
        bounds: per feature, where each block of rows begins, and the end.
        device: of the ids.
    """

    def __init__(self, bounds: list[list[int]], device: torch.device | None = None) -> None:
        self.count = len(bounds[0]) - 1 if bounds else 1
        blocks = [max(bound[1], 1) for bound in bounds]
        even = all(
            bound == [min(block * place, bound[-1]) for place in range(self.count + 1)]
            for bound, block in zip(bounds, blocks, strict=True)
        )
        self._block_sizes = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._bounds = (
            None if even else [torch.tensor(b, dtype=torch.int64, device=device) for b in bounds]
        )

    def sort(
        self, features: KeyedJaggedTensor, *, places: bool, positions: bool
    ) -> tuple[KeyedJaggedTensor, Tensor | None]:
        """See `bucketize_kjt_before_all2all`."""
        return bucketize_kjt_before_all2all(
            features,
            num_buckets=self.count,
            block_sizes=self._block_sizes,
            output_permute=places,
            bucketize_pos=positions,
            block_bucketize_row_pos=self._bounds,
        )


class RwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids to the ranks that hold their rows.

    Args:
        pg: the ranks.
        row_bounds: per feature, where each rank's rows begin, and the end.
        device: of the ids.
        is_sequence: keep where each id went, in ``unbucketize_permute_tensor``.
        need_pos: send each id's place in its bag as its weight.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        row_bounds: list[list[int]],
        device: torch.device | None = None,
        *,
        is_sequence: bool = False,
        need_pos: bool = False,
    ) -> None:
        super().__init__()
        self._buckets = RowBuckets(row_bounds, device)
        self._is_sequence, self._need_pos = is_sequence, need_pos
        self._dist = KJTAllToAll(pg=pg, splits=[len(row_bounds)] * pg.size())
        self.unbucketize_permute_tensor: Tensor | None = None

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send ``F`` features."""
        bucketized, self.unbucketize_permute_tensor = self._buckets.sort(
            sparse_features,
            places=self._is_sequence,
            positions=self._need_pos and sparse_features.weights_or_none() is None,
        )
        return self._dist(bucketized)  # type: ignore[no-any-return] # nn.Module's call is untyped


class RwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Parts of pooled vectors, added up on their way to the ranks of their samples.

    Args:
        pg: the ranks.
        embedding_dims: ``[F]`` columns.
        codecs: how vectors are written for the network.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        embedding_dims: list[int],
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg, self._codecs, self._embedding_dims = pg, codecs, embedding_dims
        self._dist = PooledEmbeddingsReduceScatter(pg=pg, codecs=codecs)
        self._variable_dist: VariableBatchPooledEmbeddingsReduceScatter | None = None

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[sum of B, columns]``; the wait gives ``[B, columns]``.

        Where the batch varies per feature both are flat: rank by rank, feature by feature.
        """
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            if self._variable_dist is None:
                self._variable_dist = VariableBatchPooledEmbeddingsReduceScatter(
                    pg=self._pg, codecs=self._codecs
                )
            return self._variable_dist(  # type: ignore[no-any-return] # nn.Module's call is untyped
                local_embs,
                batch_size_per_rank_per_feature=sharding_ctx.batch_size_per_rank_per_feature,
                embedding_dims=self._embedding_dims,
            )
        sizes = None if sharding_ctx is None else sharding_ctx.batch_size_per_rank
        return self._dist(local_embs, input_splits=sizes)  # type: ignore[no-any-return] # nn.Module's call is untyped


class BaseRwEmbeddingSharding(PlannedSharding[C, T, W]):
    """What pooled and unpooled tables have in common."""

    sharding_type = ShardingType.ROW_WISE
    is_sequence = False

    def _check_plan(self) -> None:
        self._row_bounds = self.row_bounds_per_feature(range(self._world_size))

    def senders(self) -> list[int]:
        """All ranks look up the same features."""
        return [0]

    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel."""
        return RwSparseFeaturesDist(
            pg,
            self._row_bounds,
            device,
            is_sequence=self.is_sequence,
            need_pos=any(group.has_feature_processor for group in self.groups_here()),
        )


class RwPooledEmbeddingSharding(
    PooledSharding, BaseRwEmbeddingSharding[EmbeddingShardingContext, Tensor, Tensor]
):
    """Row-wise sharding of pooled tables."""

    def _output_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back."""
        del device
        sums = RwPooledEmbeddingDist(
            pg,
            self.dims_per_sender()[0],
            self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER),
        )
        return in_order(sums, self.order)
