"""How pooled vectors travel back to the ranks of their samples: what strategies choose from.

Legend: ``W`` ranks, ``L`` ranks per node, ``M`` nodes, ``B`` samples of a rank, ``F`` features that
are looked up here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import CommOp
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.sharding.interfaces import (
    BaseEmbeddingDist,
    EmbeddingShardingContext,
)
from tessera.training.distributed.sharding.layout import Way
from tessera.training.distributed.travel.pooled_vectors import (
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)

PooledDist = BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]


class PooledEmbeddingDist(PooledDist):
    """Pooled vectors to the ranks of their samples.

    Args:
        fixed: called with vectors ``[sum of B, columns here]`` and the ranks' ``B``, where all
            features have the same number of bags.
        varying: called with flat vectors and the batch's sizes, where they have not.
        order: into which the columns are put that have come; None: they stay.  Flat vectors have no
            columns yet, and stay.
    """

    def __init__(
        self,
        fixed: Callable[[Tensor, list[int] | None], Awaitable[Tensor]],
        varying: Callable[[Tensor, EmbeddingShardingContext], Awaitable[Tensor]],
        order: ColumnOrder | None = None,
    ) -> None:
        super().__init__()
        self._fixed, self._varying, self._order = fixed, varying, order

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[sum of B, columns here]``; the wait gives ``[B, columns]``.

        Where the batch varies per feature both are flat: rank by rank, feature by feature.
        """
        if sharding_ctx is not None and sharding_ctx.variable_batch_per_feature:
            return self._varying(local_embs, sharding_ctx)
        sizes = None if sharding_ctx is None else sharding_ctx.batch_size_per_rank
        awaitable = self._fixed(local_embs, sizes)
        if self._order is not None:
            awaitable.callbacks.append(self._order.permute)
        return awaitable


class TwRwPooledEmbeddingDist(PooledDist):
    """Parts of pooled vectors, added up within the node, then exchanged between nodes.

    Local rank ``l`` gets the sums of all samples of the ranks that are ``l`` on their nodes; then
    each such set of ranks, one per node, exchanges its samples.

    Args:
        place: ``l``, this rank's place on its node.
        sums: the way within the node.
        exchange: the way among the ranks with this place, one per node.
        local_size: ``L``.
    """

    def __init__(
        self,
        place: int,
        sums: PooledDist,
        exchange: PooledDist,
        local_size: int,
    ) -> None:
        super().__init__()
        self._place, self._local_size = place, local_size
        self._sums, self._exchange = sums, exchange

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[sum of B, columns of this node]``; the wait gives ``[B, all columns]``.

        Where the batch varies per feature both are flat: rank by rank, feature by feature.
        """
        assert sharding_ctx is not None
        inside, between = self._contexts(sharding_ctx)
        return self._exchange(self._sums(local_embs, inside).wait(), between)  # type: ignore[no-any-return] # nn.Module's call is untyped

    def _contexts(
        self, ctx: EmbeddingShardingContext
    ) -> tuple[EmbeddingShardingContext, EmbeddingShardingContext]:
        """The batch sizes of either way; received bags come by place, then by node."""
        if not ctx.variable_batch_per_feature:
            # [L][M]
            sizes = [
                ctx.batch_size_per_rank[place :: self._local_size]
                for place in range(self._local_size)
            ]
            return (
                EmbeddingShardingContext([sum(of_nodes) for of_nodes in sizes]),
                EmbeddingShardingContext(sizes[self._place]),
            )
        # [L * M][F]
        received = ctx.batch_size_per_rank_per_feature
        nodes = len(received) // self._local_size
        by_place = [received[first : first + nodes] for first in range(0, len(received), nodes)]
        sums = [
            [sum(of_nodes) for of_nodes in zip(*of_place, strict=True)] for of_place in by_place
        ]
        return (
            EmbeddingShardingContext([], sums, [], variable_batch_per_feature=True),
            EmbeddingShardingContext(
                [],
                by_place[self._place],
                ctx.batch_size_per_feature_pre_a2a,
                variable_batch_per_feature=True,
            ),
        )


def all_here(order: ColumnOrder | None) -> PooledDist:
    """Vectors stay: they are of this rank's own samples."""
    return PooledEmbeddingDist(
        lambda vectors, _: NoWait(vectors), lambda vectors, _: NoWait(vectors), order
    )


def vectors_stay(way: Way) -> PooledDist:
    """Every rank has looked up its own samples."""
    return all_here(way.order)


def _exchange(way: Way, pg: dist.ProcessGroup) -> PooledDist:
    """Vectors among the ranks of ``pg``, each to the rank of its sample (all-to-all)."""
    codecs = way.codecs(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL)
    dims = way.layout.dims_per_team()
    varying = VariableBatchPooledEmbeddingsAllToAll(pg, dims, codecs=codecs)
    return PooledEmbeddingDist(
        PooledEmbeddingsAllToAll(
            pg, [sum(own) for own in dims], way.device, codecs=codecs, order=way.order
        ),
        lambda vectors, ctx: varying(
            vectors, ctx.batch_size_per_rank_per_feature, ctx.batch_size_per_feature_pre_a2a
        ),
    )


def _sums(
    way: Way, pg: dist.ProcessGroup, dims: list[int], order: ColumnOrder | None = None
) -> PooledDist:
    """Parts of vectors of ``dims`` columns, added up on their way in ``pg`` (reduce-scatter)."""
    codecs = way.codecs(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    varying = VariableBatchPooledEmbeddingsReduceScatter(pg, codecs)
    return PooledEmbeddingDist(
        PooledEmbeddingsReduceScatter(pg, codecs),
        lambda vectors, ctx: varying(vectors, ctx.batch_size_per_rank_per_feature, dims),
        order,
    )


def vectors_to_samples(way: Way) -> PooledDist:
    """Each vector to the rank of its sample (all-to-all)."""
    return _exchange(way, way.pg)


def sums_to_samples(way: Way) -> PooledDist:
    """The sum of all ranks' parts to the rank of its sample (reduce-scatter)."""
    return _sums(way, way.pg, way.layout.dims_per_team()[0], way.order)


def node_sums_to_samples(way: Way) -> PooledDist:
    """The sum of a node's parts to the rank of its sample (reduce-scatter, then all-to-all)."""
    intra_pg, cross_pg = way.layout.node_groups(way.device)
    assert intra_pg is not None, "tables are not on the meta device"
    assert cross_pg is not None, "tables are not on the meta device"
    world = way.layout.world
    node, place = divmod(world.rank, world.local_size)
    return TwRwPooledEmbeddingDist(
        place,
        _sums(way, intra_pg, way.layout.dims_per_team()[node]),
        _exchange(way, cross_pg),
        world.local_size,
    )
