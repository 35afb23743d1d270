"""Modules that send one vector per id back to the rank of the id.

Legend: W ranks, F own features, B_r batch of rank r, N ids that arrived, D columns.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tessera.training.distributed.comm.alltoall_sequence import alltoall_sequence
from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs


def ids_per_segment(lengths: Tensor, bags: Tensor) -> Tensor:
    """Sums ``[S]`` int64 of successive ``lengths`` ``[sum of bags]``, ``bags`` ``[S]`` of them each."""
    sums = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
    ends = bags.cumsum(0)
    return sums[ends] - sums[ends - bags]


class _Permute(Function):
    """Rows in another order; each comes once, so that the gradient is an assignment."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.empty_like(grad_output).index_copy_(0, order, grad_output), None


def permuted_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Row ``i`` of the result is row ``order[i]``; ``order`` ``[N]`` int64 is a permutation."""
    permuted: Tensor = _Permute.apply(rows, order)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return permuted


class SequenceEmbeddingsAwaitable(Awaitable[Tensor]):
    """Waits for the vectors ``[N, embedding_dim]`` of ids, which a collective gives.

    Args:
        tensor_awaitable: of the collective.
        unbucketize_permute_tensor: ``[N]``: where the vector of each id is in what arrives; None:
            in its place.
        embedding_dim: D.
    """

    def __init__(
        self,
        tensor_awaitable: Awaitable[Tensor],
        unbucketize_permute_tensor: Tensor | None,
        embedding_dim: int,
    ) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable
        self._unbucketize = unbucketize_permute_tensor
        self._embedding_dim = embedding_dim

    def _wait_impl(self) -> Tensor:
        vectors = self._tensor_awaitable.wait().view(-1, self._embedding_dim)
        return vectors if self._unbucketize is None else permuted_rows(vectors, self._unbucketize)


class SequenceEmbeddingsAllToAll(nn.Module):
    """Sends the vector of every id to the rank that asked for it.

    Args:
        pg: the ranks.
        features_per_rank: ``[W]`` features that each rank looks up.
        device: where the vectors are; None: the CPU.
        codecs: how numbers travel; None: as they are.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        features_per_rank: list[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs
        ranks, features = pg.size(), features_per_rank[pg.rank()]
        places = torch.arange(ranks * features)
        # From (feature, source) to (source, feature), and back.
        self._forward_recat = places.view(features, ranks).t().flatten().to(device)
        self._backward_recat = places.view(ranks, features).t().flatten().to(device)
        self._features = features

    def forward(  # noqa: PLR0917 - the reference's signature
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: list[int] | None = None,
        sparse_features_recat: Tensor | None = None,
        batch_size_per_rank_per_feature: list[list[int]] | None = None,
    ) -> SequenceEmbeddingsAwaitable:
        """Begin to send; the wait gives ``[sum of input_splits, D]``, as the ids were sent.

        Args:
            local_embs: ``[N, D]``, in the order (feature, source, sample).
            lengths: ``[bags]``: ids of each bag, in that order.
            input_splits: ids that went to each rank.
            output_splits: ids that came from each rank.
            unbucketize_permute_tensor: see `SequenceEmbeddingsAwaitable`.
            batch_size_per_rank: B_r; None: all ranks have equal shares of the bags.
            sparse_features_recat: the order in which received segments (source, feature) were put;
                None: by feature, then by source.
            batch_size_per_rank_per_feature: ``[W][F]``, where it varies per feature.
        """
        forward_recat, backward_recat = self._forward_recat, self._backward_recat
        segments = forward_recat.numel()
        if sparse_features_recat is not None and sparse_features_recat.numel() == segments:
            backward_recat = sparse_features_recat
            forward_recat = torch.argsort(sparse_features_recat)
        bags: list[int] | None = None
        if batch_size_per_rank_per_feature is not None:
            bags = list(chain(*zip(*batch_size_per_rank_per_feature, strict=True)))
        elif batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1:
            bags = batch_size_per_rank * self._features
        varies = bags is not None and segments > 0
        if varies:
            lengths = ids_per_segment(lengths, torch.tensor(bags, device=lengths.device))
        splits = input_splits, output_splits
        awaitable = alltoall_sequence(
            local_embs,
            forward_recat,
            backward_recat,
            lengths,
            *splits,
            varies,
            self._pg,
            self._codecs,
        )
        return SequenceEmbeddingsAwaitable(
            awaitable, unbucketize_permute_tensor, local_embs.size(-1)
        )
