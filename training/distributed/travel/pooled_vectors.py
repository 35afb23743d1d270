"""Pooled vectors travel back: modules around the collectives of `comm`.

Legend: W ranks, B_r batch of rank r, B own batch, D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.alltoall_pooled import (
    alltoall_pooled,
    variable_batch_alltoall_pooled,
)
from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.reduce_scatter import (
    all_gather_base_pooled,
    reduce_scatter_base_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
)

Callbacks = list[Callable[[Tensor], Tensor]]


class PooledEmbeddingsAwaitable(Awaitable[Tensor]):
    """Waits for pooled vectors, which a collective's ``tensor_awaitable`` gives."""

    def __init__(self, tensor_awaitable: Awaitable[Tensor]) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable

    def _wait_impl(self) -> Tensor:
        return self._tensor_awaitable.wait()


class _PooledExchange(nn.Module):
    """What the modules that send pooled vectors have in common.

    Args:
        pg: the ranks.
        codecs: how numbers travel; None: as they are.
        callbacks: applied to the result.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        codecs: QuantizedCommCodecs | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs
        self._callbacks = list(callbacks or [])

    @property
    def callbacks(self) -> Callbacks:
        """Return the functions that are applied to the result."""
        return self._callbacks

    def _under_way(self, awaitable: Awaitable[Tensor]) -> PooledEmbeddingsAwaitable:
        result = PooledEmbeddingsAwaitable(awaitable)
        result.callbacks.extend(self._callbacks)
        return result


class PooledEmbeddingsAllToAll(_PooledExchange):
    """Sends every rank its samples' vectors; see `comm.alltoall_pooled`.

    Args:
        pg, callbacks, codecs: as of all of these modules.
        dim_sum_per_rank: ``[W]`` columns of each rank's tables.
        device: where the vectors are; None: the CPU.
        order: of the output's columns; None: rank by rank.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dim_sum_per_rank: list[int],
        device: torch.device | None = None,
        callbacks: Callbacks | None = None,
        codecs: QuantizedCommCodecs | None = None,
        *,
        order: ColumnOrder | None = None,
    ) -> None:
        super().__init__(pg, codecs, callbacks)
        self._order = order
        self._dims = dim_sum_per_rank
        sums = list(accumulate(dim_sum_per_rank, initial=0))[:-1]
        self._dims_tensor = torch.tensor(dim_sum_per_rank, dtype=torch.int64, device=device)
        self._sums_tensor = torch.tensor(sums, dtype=torch.int64, device=device)

    def forward(
        self, local_embs: Tensor, batch_size_per_rank: list[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Begin to send ``[sum of B_r, own columns]``; the wait gives ``[B, sum of columns]``.

        Without ``batch_size_per_rank`` all ranks have equal shares of the rows.
        """
        if batch_size_per_rank is None:
            ranks = self._pg.size()
            batch_size_per_rank = [local_embs.size(0) // ranks] * ranks
        dims = self._dims, self._dims_tensor, self._sums_tensor
        return self._under_way(
            alltoall_pooled(
                local_embs, batch_size_per_rank, *dims, self._pg, self._codecs, order=self._order
            )
        )


class VariableBatchPooledEmbeddingsAllToAll(_PooledExchange):
    """`PooledEmbeddingsAllToAll` where every feature has a batch size of its own.

    Args:
        pg, callbacks, codecs: as of all of these modules.
        emb_dim_per_rank_per_feature: ``[W][features of rank r]`` columns.
        device: not needed to send flat vectors; it may be given as to the other modules.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        emb_dim_per_rank_per_feature: list[list[int]],
        device: torch.device | None = None,
        callbacks: Callbacks | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        del device
        super().__init__(pg, codecs, callbacks)
        self._dims = emb_dim_per_rank_per_feature

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        batch_size_per_feature_pre_a2a: list[int],
    ) -> PooledEmbeddingsAwaitable:
        """Begin to send flat vectors; see `comm.alltoall_pooled.variable_batch_alltoall_pooled`.

        Args:
            local_embs: flat.
            batch_size_per_rank_per_feature: ``[W][own features]`` samples of each rank.
            batch_size_per_feature_pre_a2a: own samples per feature, in the ranks' order.
        """
        awaitable = variable_batch_alltoall_pooled(
            local_embs,
            batch_size_per_rank_per_feature,
            batch_size_per_feature_pre_a2a,
            self._dims,
            self._pg,
            self._codecs,
        )
        return self._under_way(awaitable)


class PooledEmbeddingsReduceScatter(_PooledExchange):
    """Adds the ranks' parts of pooled vectors; every rank gets its samples' sums."""

    def forward(
        self, local_embs: Tensor, input_splits: list[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Begin to send ``[sum of B_r, D]``; the wait gives ``[B, D]``.

        ``input_splits`` are B_r; without them all ranks have equal shares of the rows.
        """
        if input_splits is None or len(set(input_splits)) == 1:
            awaitable = reduce_scatter_base_pooled(local_embs, self._pg, self._codecs)
        else:
            awaitable = reduce_scatter_v_pooled(local_embs, input_splits, self._pg, self._codecs)
        return PooledEmbeddingsAwaitable(awaitable)


class VariableBatchPooledEmbeddingsReduceScatter(_PooledExchange):
    """`PooledEmbeddingsReduceScatter` where every feature has a batch size of its own."""

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        embedding_dims: list[int],
    ) -> PooledEmbeddingsAwaitable:
        """Begin to send flat vectors; the wait gives each feature's ``[B, D]`` block, flat.

        Args:
            local_embs: per rank, per feature, its ``[B, D]`` block.
            batch_size_per_rank_per_feature: ``[W][F]`` samples.
            embedding_dims: ``[F]`` columns.
        """
        return PooledEmbeddingsAwaitable(
            reduce_scatter_v_per_feature_pooled(
                local_embs,
                batch_size_per_rank_per_feature,
                embedding_dims,
                self._pg,
                self._codecs,
            )
        )


class PooledEmbeddingsAllGather(_PooledExchange):
    """Gives every rank every rank's vectors."""

    def forward(self, local_emb: Tensor) -> PooledEmbeddingsAwaitable:
        """Begin to send ``[B, D]``, alike on every rank; the wait gives ``[W * B, D]`` in rank order."""
        return PooledEmbeddingsAwaitable(all_gather_base_pooled(local_emb, self._pg, self._codecs))
