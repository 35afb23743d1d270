"""Table-row-wise and grid, unpooled: a node's ranks hold blocks of a table's rows.

* How ids travel: sorted by the rank that holds their row, then to it (one all-to-all over all
  ranks); the ids of a feature go to one node only, or to one per block of columns (grid).
* Which rows are here: one block of rows of each of the node's tables, or of its columns there.
* How vectors travel back: the vector of each id straight to the rank that asked (all-to-all),
  where the sorting is undone.  Nothing is added up, so nodes need no step of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.alltoall_sequence import segment_order
from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.embedding_sharding import BaseSparseFeaturesDist
from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceSharding,
    SequenceShardingContext,
)
from tessera.training.distributed.sharding.twrw_sharding import (
    BaseTwRwEmbeddingSharding,
    TwRwSparseFeaturesDist,
)
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class TwRwSequenceFeaturesDist(TwRwSparseFeaturesDist):
    """`TwRwSparseFeaturesDist` that keeps where each id went.

    Received bags come in the ranks' order.

    Args:
        pg: all ranks.
        local_size: ranks per node.
        features_per_node: features that each node looks up; they come in the nodes' order.
        row_bounds: per feature, where the rows of each rank of its node begin, and the end.
        device: of the ids.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        local_size: int,
        features_per_node: list[int],
        row_bounds: list[list[int]],
        device: torch.device | None = None,
    ) -> None:
        super().__init__(pg, local_size, features_per_node, row_bounds, device)
        self._dist = KJTAllToAll(
            pg=pg, splits=[count for count in features_per_node for _ in range(local_size)]
        )
        self.unbucketize_permute_tensor: Tensor | None = None

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send ``[sum of features_per_node]`` features."""
        bucketized, places = self._buckets.sort(sparse_features, places=True, positions=False)
        assert places is not None
        if self._in_order:
            self.unbucketize_permute_tensor = places
            return self._dist(bucketized)  # type: ignore[no-any-return] # nn.Module's call is untyped
        sent = bucketized.permute(self._order, self._order_tensor)
        sizes = torch.tensor(bucketized.length_per_key(), device=places.device)
        order = segment_order(sizes, self._order_tensor, places.numel())
        moved_to = torch.empty_like(order)
        moved_to[order] = torch.arange(order.numel(), device=order.device)
        self.unbucketize_permute_tensor = moved_to[places]
        return self._dist(sent)  # type: ignore[no-any-return] # nn.Module's call is untyped


class TwRwSequenceEmbeddingSharding(
    SequenceSharding, BaseTwRwEmbeddingSharding[SequenceShardingContext, Tensor, Tensor]
):
    """Table-row-wise sharding of unpooled tables."""

    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel."""
        return TwRwSequenceFeaturesDist(
            pg,
            self._local_size,
            self.features_per_sender(),
            self._row_bounds,
            device,
        )


class GridSequenceEmbeddingSharding(TwRwSequenceEmbeddingSharding):
    """Grid sharding of unpooled tables."""

    sharding_type = ShardingType.GRID_SHARD
