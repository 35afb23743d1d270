"""Table-row-wise: a table lives on one node, each of its ranks holds a block of the rows.

* How ids travel: each id to the rank that holds its row (one all-to-all over all ranks); the
  ids of a feature go to one node only.
* Which rows are here: one block of each of the node's tables.
* How vectors travel back: within the node, where links are fast, the ranks' parts are added up
  (reduce-scatter): local rank ``l`` gets the sums of all samples of the ranks that are ``l`` on
  their nodes.  Then each such set of ranks, one per node, exchanges its samples (all-to-all).

Legend: ``L`` ranks per node, ``M`` nodes, ``l`` a place on a node, ``m`` a node.  Received bags
come in the order that the way back needs: by ``l``, then by ``m``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.nodes import get_local_size, intra_and_cross_node_pg
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
from tessera.training.distributed.sharding.rw_sharding import RowBuckets
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll
from tessera.training.distributed.travel.pooled_vectors import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class TwRwSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids to the ranks that hold their rows, on the nodes that hold their tables.

    Args:
        pg: all ranks.
        local_size: ``L``.
        features_per_node: ``[M]`` features that each node looks up; they come in the nodes' order.
        row_bounds: per feature, where the rows of each rank of its node begin, and the end.
        device: of the ids.
        need_pos: send each id's place in its bag as its weight.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        local_size: int,
        features_per_node: list[int],
        row_bounds: list[list[int]],
        device: torch.device | None = None,
        *,
        need_pos: bool = False,
    ) -> None:
        super().__init__()
        nodes = len(features_per_node)
        self._buckets = RowBuckets(row_bounds, device)
        self._need_pos = need_pos
        firsts = [sum(features_per_node[:node]) for node in range(nodes)]
        # From (l, feature) to the order of the destinations: (m, l, feature of m).
        self._order = [
            place * len(row_bounds) + first + feature
            for first, count in zip(firsts, features_per_node, strict=True)
            for place in range(local_size)
            for feature in range(count)
        ]
        self._order_tensor = torch.tensor(self._order, dtype=torch.int32, device=device)
        # One node: bucketized features are in the destinations' order already.
        self._in_order = self._order == list(range(len(self._order)))
        self._dist = KJTAllToAll(
            pg=pg,
            splits=[count for count in features_per_node for _ in range(local_size)],
            stagger=nodes,
        )

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Begin to send ``[sum of features_per_node]`` features."""
        bucketized, _ = self._buckets.sort(
            sparse_features,
            places=False,
            positions=self._need_pos and sparse_features.weights_or_none() is None,
        )
        if not self._in_order:
            bucketized = bucketized.permute(self._order, self._order_tensor)
        return self._dist(bucketized)  # type: ignore[no-any-return] # nn.Module's call is untyped


class TwRwPooledEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Parts of pooled vectors, added up within the node, then exchanged between nodes.

    Args:
        rank: this rank.
        cross_pg: the ranks with this rank's place, one per node.
        intra_pg: the ranks of this node.
        dims_per_node: columns of each feature that each node looks up.
        device: where this rank computes.
        intra_codecs: how vectors are written within the node.
        cross_codecs: how vectors are written between nodes.
        order: of the columns that arrive; None: node by node.
    """

    def __init__(
        self,
        rank: int,
        cross_pg: dist.ProcessGroup,
        intra_pg: dist.ProcessGroup,
        dims_per_node: list[list[int]],
        device: torch.device | None = None,
        *,
        intra_codecs: QuantizedCommCodecs | None = None,
        cross_codecs: QuantizedCommCodecs | None = None,
        order: ColumnOrder | None = None,
    ) -> None:
        super().__init__()
        self._local_size, self._nodes = intra_pg.size(), cross_pg.size()
        self._node, self._place = divmod(rank, self._local_size)
        self._dims_per_node = dims_per_node
        self._intra_dist = PooledEmbeddingsReduceScatter(pg=intra_pg, codecs=intra_codecs)
        self._cross_dist = PooledEmbeddingsAllToAll(
            pg=cross_pg,
            dim_sum_per_rank=[sum(dims) for dims in dims_per_node],
            device=device,
            codecs=cross_codecs,
            order=order,
        )
        self._variable_intra_dist = VariableBatchPooledEmbeddingsReduceScatter(
            pg=intra_pg, codecs=intra_codecs
        )
        self._variable_cross_dist = VariableBatchPooledEmbeddingsAllToAll(
            pg=cross_pg,
            emb_dim_per_rank_per_feature=dims_per_node,
            device=device,
            codecs=cross_codecs,
        )

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[sum of B, columns of this node]``; the wait gives ``[B, all columns]``.

        Where the batch varies per feature both are flat: rank by rank, feature by feature.
        """
        assert sharding_ctx is not None
        if sharding_ctx.variable_batch_per_feature:
            return self._forward_variable(local_embs, sharding_ctx)
        # [L][M]: the order of the received bags.
        sizes = [
            sharding_ctx.batch_size_per_rank[place :: self._local_size]
            for place in range(self._local_size)
        ]
        sums = self._intra_dist(
            local_embs, input_splits=[sum(of_nodes) for of_nodes in sizes]
        ).wait()
        return self._cross_dist(sums, batch_size_per_rank=sizes[self._place])  # type: ignore[no-any-return] # nn.Module's call is untyped

    def _forward_variable(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext
    ) -> Awaitable[Tensor]:
        # [L * M][F of this node]: received bags come by place, then by node.
        received = sharding_ctx.batch_size_per_rank_per_feature
        by_place = [
            received[place * self._nodes : (place + 1) * self._nodes]
            for place in range(self._local_size)
        ]
        sums = self._variable_intra_dist(
            local_embs,
            batch_size_per_rank_per_feature=[
                [sum(of_nodes) for of_nodes in zip(*sizes, strict=True)] for sizes in by_place
            ],
            embedding_dims=self._dims_per_node[self._node],
        ).wait()
        return self._variable_cross_dist(  # type: ignore[no-any-return] # nn.Module's call is untyped
            sums,
            batch_size_per_rank_per_feature=by_place[self._place],
            batch_size_per_feature_pre_a2a=sharding_ctx.batch_size_per_feature_pre_a2a,
        )


class BaseTwRwEmbeddingSharding(PlannedSharding[C, T, W]):
    """What pooled tables of this type and of grid sharding have in common."""

    sharding_type = ShardingType.TABLE_ROW_WISE

    def _check_plan(self) -> None:
        self._local_size = 1 if self._pg is None else get_local_size(self._world_size)
        if self._world_size % self._local_size:
            raise ValueError(
                f"the world has {self._world_size} ranks, which are no nodes of "
                f"{self._local_size}; set LOCAL_WORLD_SIZE to the ranks per node"
            )
        self._row_bounds = [
            bounds
            for first in self.senders()
            for bounds in self.row_bounds_per_feature(self._node(first))
        ]

    def _node(self, first: int) -> Sequence[int]:
        return range(first, first + self._local_size)

    def senders(self) -> list[int]:
        """The ranks of a node look up the same features."""
        return list(range(0, self._world_size, self._local_size))

    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel."""
        return TwRwSparseFeaturesDist(
            pg,
            self._local_size,
            self.features_per_sender(),
            self._row_bounds,
            device,
            need_pos=any(
                group.has_feature_processor for groups in self._groups_per_rank for group in groups
            ),
        )


class TwRwPooledEmbeddingSharding(
    PooledSharding, BaseTwRwEmbeddingSharding[EmbeddingShardingContext, Tensor, Tensor]
):
    """Table-row-wise sharding of pooled tables."""

    def _output_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back."""
        del pg
        intra_pg, cross_pg = intra_and_cross_node_pg(device)
        assert intra_pg is not None, "tables are not on the meta device"
        assert cross_pg is not None, "tables are not on the meta device"
        return TwRwPooledEmbeddingDist(
            self._rank,
            cross_pg,
            intra_pg,
            self.dims_per_sender(),
            device,
            intra_codecs=self._codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER),
            cross_codecs=self._codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL),
            order=self.order,
        )
