"""How the vectors of single ids travel back: what strategies choose from.

Vectors take the way of the ids in the opposite direction, so they are received in the order in which
the ids were sent; nothing is added up.

Legend: ``W`` ranks, ``N`` ids that were received here, ``F`` features that this rank looks up, ``D``
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed, nn
from typing_extensions import Self

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.sharding.interfaces import (
    BaseEmbeddingDist,
    EmbeddingShardingContext,
)
from tessera.training.distributed.sharding.layout import Way
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAllTensorsAwaitable
from tessera.training.distributed.travel.sequence_vectors import SequenceEmbeddingsAllToAll
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass
class SequenceShardingContext(EmbeddingShardingContext):
    """What the way back of one batch needs to know of the way there.

    Attributes:
        features_before_input_dist: what was sent.
        input_splits: ``[W]`` ids that went to each rank.
        output_splits: ``[W]`` ids that came from each rank.
        sparse_features_recat: the order in which received segments (source, feature) were put.
        unbucketize_permute_tensor: ``[ids sent]``: where each id was when ids were sorted by the
            rank that holds their row; None where they were not.
        lengths_after_input_dist: ids of each bag that was received.
        length_per_key_after_input_dist: ``[F]`` ids of each feature that were received.
    """

    features_before_input_dist: KeyedJaggedTensor | None = None
    input_splits: list[int] = field(default_factory=list)
    output_splits: list[int] = field(default_factory=list)
    sparse_features_recat: Tensor | None = None
    unbucketize_permute_tensor: Tensor | None = None
    lengths_after_input_dist: Tensor | None = None
    length_per_key_after_input_dist: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sent: KeyedJaggedTensor, dist: nn.Module) -> Self:
        """The context of features that ``dist`` has begun to send."""
        ctx = super().of(sent, dist)
        ctx.features_before_input_dist = sent
        ctx.unbucketize_permute_tensor = getattr(dist, "unbucketize_permute_tensor", None)
        return ctx

    def take_exchange(self, exchange: KJTAllToAllTensorsAwaitable) -> None:
        """Learn the sizes that the ranks have exchanged."""
        super().take_exchange(exchange)
        self.input_splits = exchange.input_splits["values"]
        self.output_splits = exchange.output_splits["values"]
        self.sparse_features_recat = exchange.recat

    def take_features(self, features: KeyedJaggedTensor) -> None:
        """Learn the sizes of the features that were received."""
        super().take_features(features)
        self.lengths_after_input_dist = features.lengths()
        self.length_per_key_after_input_dist = features.length_per_key()


class LocalSequenceEmbeddingDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]):
    """Vectors of ``[F]`` columns stay: they are of this rank's own ids."""

    def __init__(self, dims: list[int]) -> None:
        super().__init__()
        self._dims = dims

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """``[N * D]`` flat to ``[N, the most columns of any feature]``."""
        assert sharding_ctx is not None
        width = max(self._dims, default=0)
        sizes = sharding_ctx.length_per_key_after_input_dist
        return NoWait(as_rows(local_embs, self._dims, sizes, width))


class SequenceEmbeddingDist(BaseEmbeddingDist[SequenceShardingContext, Tensor, Tensor]):
    """The vector of each id to the rank that asked for it.

    Args:
        pg: the ranks.
        dims_per_rank: columns of each feature that each rank looks up.
        device: where this rank computes.
        codecs: how vectors are written for the network.
    """

    def __init__(
        self,
        pg: distributed.ProcessGroup,
        dims_per_rank: list[list[int]],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._dims = dims_per_rank[pg.rank()]
        self._width = max((dim for dims in dims_per_rank for dim in dims), default=0)
        self._dist = SequenceEmbeddingsAllToAll(
            pg=pg,
            features_per_rank=[len(dims) for dims in dims_per_rank],
            device=device,
            codecs=codecs,
        )

    def forward(
        self, local_embs: Tensor, sharding_ctx: SequenceShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send ``[N * D]``; the wait gives ``[ids sent, the most columns of any feature]``.

        A feature with fewer columns than another is filled up with zeros.
        """
        ctx = sharding_ctx
        assert ctx is not None
        assert ctx.lengths_after_input_dist is not None
        rows = as_rows(local_embs, self._dims, ctx.length_per_key_after_input_dist, self._width)
        varies = ctx.variable_batch_per_feature
        return self._dist(  # type: ignore[no-any-return] # nn.Module's call is untyped
            rows,
            lengths=ctx.lengths_after_input_dist,
            input_splits=ctx.input_splits,
            output_splits=ctx.output_splits,
            unbucketize_permute_tensor=ctx.unbucketize_permute_tensor,
            batch_size_per_rank=None if varies else ctx.batch_size_per_rank,
            batch_size_per_rank_per_feature=(
                ctx.batch_size_per_rank_per_feature if varies else None
            ),
        )


def as_rows(flat: Tensor, dims: list[int], sizes: list[int], width: int) -> Tensor:
    """Vectors of features of different widths as rows of one width, filled up with zeros.

    Args:
        flat: ``[sum of sizes x dims]``, feature by feature.
        dims: ``[F]`` columns.
        sizes: ``[F]`` vectors.
        width: columns of the result, at least the most of ``dims``.
    """
    if all(dim == width for dim in dims):
        return flat.view(-1, width) if width else flat.view(0, 0)
    pieces = flat.split_with_sizes([n * dim for n, dim in zip(sizes, dims, strict=True)])
    return torch.cat(
        [
            torch.nn.functional.pad(piece.view(-1, dim), (0, width - dim))
            for piece, dim in zip(pieces, dims, strict=True)
        ]
    )


def own_vectors_stay(way: Way) -> LocalSequenceEmbeddingDist:
    """Every rank has looked up its own ids."""
    return LocalSequenceEmbeddingDist(way.layout.dims_per_rank()[way.layout.world.rank])


def vectors_to_senders(way: Way) -> SequenceEmbeddingDist:
    """The vector of each id straight to the rank that asked (all-to-all): nothing is added up."""
    codecs = way.codecs(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL)
    return SequenceEmbeddingDist(way.pg, way.layout.dims_per_rank(), way.device, codecs)
