"""Pooled vectors travel from the ranks that hold the tables to the ranks that hold the samples.

The functions take ``group``, the ranks (None: the default group), and ``codecs``, how numbers travel
(None: as they are).  Legend: W ranks, B_r batch of rank r, B own batch, D_r columns of rank r's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.request import (
    AllToAll,
    start_exchange,
)
from tessera.training.fbgemm import load_sparse_operators


def join_columns(flat: Tensor, rows: int, columns: list[int]) -> Tensor:
    """Blocks ``[rows, columns[r]]``, one after the other in ``flat``, side by side."""
    if len(set(columns)) == 1:
        blocks = flat.view(len(columns), rows, columns[0])
        return blocks.transpose(0, 1).reshape(rows, len(columns) * columns[0])
    blocks_ = flat.split_with_sizes([rows * width for width in columns])
    return torch.cat(
        [block.view(rows, width) for block, width in zip(blocks_, columns, strict=True)], dim=1
    )


def split_columns(matrix: Tensor, columns: list[int]) -> Tensor:
    """Undo `join_columns`: the blocks of ``matrix`` one after the other, flat."""
    rows = matrix.size(0)
    if len(set(columns)) == 1:
        return matrix.view(rows, len(columns), columns[0]).transpose(0, 1).reshape(-1)
    flat = matrix.new_empty(matrix.numel())
    blocks = flat.split_with_sizes([rows * width for width in columns])
    for block, part, width in zip(
        blocks, matrix.split_with_sizes(columns, dim=1), columns, strict=True
    ):
        block.view(rows, width).copy_(part)
    return flat


@dataclass
class All2AllPooledInfo(AllToAll, steps=("All2All_Pooled_Req", "All2All_Pooled_Wait")):
    """The layout of `alltoall_pooled`.

    Attributes:
        batch_size_per_rank: B_r.
        dim_sum_per_rank: D_r.
        dim_sum_per_rank_tensor: D_r as ``[W]`` int64 on the GPU, or None.
        cumsum_dim_sum_per_rank_tensor: the columns before each rank's, 0, D_0, D_0 + D_1..., likewise.
            With both, gradients on a GPU are laid out by one kernel of FBGEMM's.
        codecs: how numbers travel; None: as they are.
        order: of the output's columns; None: rank by rank.
    """

    batch_size_per_rank: list[int]
    dim_sum_per_rank: list[int]
    dim_sum_per_rank_tensor: Tensor | None
    cumsum_dim_sum_per_rank_tensor: Tensor | None
    codecs: QuantizedCommCodecs | None = None
    order: ColumnOrder | None = None

    def finish(self, received: Tensor) -> Tensor:
        """The vectors of this rank's samples, ``[B, sum of D_r]``."""
        rows = self.batch_size_per_rank[self.pg.rank()]
        if self.order is not None:
            return self.order.join(received, rows)
        return join_columns(received, rows, self.dim_sum_per_rank)

    def alone(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The input with its columns in order."""
        return inputs[0] if self.order is None else self.order.permute(inputs[0])

    def lay_out_gradient(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """Columns go back to the ranks whose tables they are of."""
        if self.order is not None:
            return self.order.split(gradients[0])
        gradient = gradients[0].contiguous()
        dims, bounds = self.dim_sum_per_rank_tensor, self.cumsum_dim_sum_per_rank_tensor
        some_everywhere = all(self.dim_sum_per_rank) and gradient.size(0) > 0
        if gradient.is_cuda and dims is not None and bounds is not None and some_everywhere:
            load_sparse_operators()
            # Its kernel moves numbers and knows no bfloat16; those of float16 have as many bits.
            is_bf16 = gradient.dtype == torch.bfloat16
            moved = gradient.view(torch.float16) if is_bf16 else gradient
            flat: Tensor = torch.ops.fbgemm.recat_embedding_grad_output_mixed_D_batch(
                moved, dims, bounds
            )
            return flat.view(gradient.dtype).view(-1)
        return split_columns(gradient, self.dim_sum_per_rank)

    def sizes(self) -> tuple[list[int], list[int]]:
        """Rows for each rank's samples, and the columns of each rank's tables."""
        rank = self.pg.rank()
        own_columns, own_rows = self.dim_sum_per_rank[rank], self.batch_size_per_rank[rank]
        return (
            [rows * own_columns for rows in self.batch_size_per_rank],
            [own_rows * columns for columns in self.dim_sum_per_rank],
        )


All2All_Pooled_Req = All2AllPooledInfo.request
All2All_Pooled_Wait = All2AllPooledInfo.wait


def alltoall_pooled(  # noqa: PLR0917 - the reference's signature
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank: list[int],
    dim_sum_per_rank: list[int],
    dim_sum_per_rank_tensor: Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
    *,
    order: ColumnOrder | None = None,
) -> Awaitable[Tensor]:
    """Send every rank its samples' vectors and put those that arrive side by side.

    ``a2a_pooled_embs_tensor`` is ``[sum of B_r, own D]``, the samples in rank order; the other
    arguments are those of `All2AllPooledInfo`.

    Returns:
        Awaitable of ``[B, sum of D_r]``.
    """
    info = All2AllPooledInfo(
        batch_size_per_rank,
        dim_sum_per_rank,
        dim_sum_per_rank_tensor,
        cumsum_dim_sum_per_rank_tensor,
        codecs,
        order,
    )
    return start_exchange(group, info, (a2a_pooled_embs_tensor,))


@dataclass
class VariableBatchAll2AllPooledInfo(
    AllToAll, steps=("Variable_Batch_All2All_Pooled_Req", "Variable_Batch_All2All_Pooled_Wait")
):
    """The layout of `variable_batch_alltoall_pooled`.

    Attributes:
        batch_size_per_rank_per_feature: ``[W][F]``: samples that rank r asked this rank for, per
            feature of this rank.
        batch_size_per_feature_pre_a2a: own samples per feature, features in the order of the
            ranks that hold them.
        emb_dim_per_rank_per_feature: ``[W][F of rank r]``: columns.
        codecs: how numbers travel; None: as they are.
        input_splits: numbers to each rank; worked out if None.
        output_splits: numbers from each rank; worked out if None.
    """

    batch_size_per_rank_per_feature: list[list[int]]
    batch_size_per_feature_pre_a2a: list[int]
    emb_dim_per_rank_per_feature: list[list[int]]
    codecs: QuantizedCommCodecs | None = None
    input_splits: list[int] | None = None
    output_splits: list[int] | None = None

    def finish(self, received: Tensor) -> Tensor:
        """Flat: per feature its ``[B, D]`` block, features in the order of the ranks."""
        return received

    def sizes(self) -> tuple[list[int], list[int]]:
        """The splits, worked out the first time."""
        if self.input_splits is None or self.output_splits is None:
            own_dims = self.emb_dim_per_rank_per_feature[self.pg.rank()]
            self.input_splits = [
                sum(rows * columns for rows, columns in zip(batch, own_dims, strict=True))
                for batch in self.batch_size_per_rank_per_feature
            ]
            bounds = [0, *accumulate(len(dims) for dims in self.emb_dim_per_rank_per_feature)]
            own_rows = self.batch_size_per_feature_pre_a2a
            self.output_splits = [
                sum(rows * columns for rows, columns in zip(own_rows[first:], dims, strict=False))
                for first, dims in zip(bounds, self.emb_dim_per_rank_per_feature, strict=False)
            ]
        return self.input_splits, self.output_splits


Variable_Batch_All2All_Pooled_Req = VariableBatchAll2AllPooledInfo.request
Variable_Batch_All2All_Pooled_Wait = VariableBatchAll2AllPooledInfo.wait


def variable_batch_alltoall_pooled(  # noqa: PLR0917 - the reference's signature
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: list[list[int]],
    batch_size_per_feature_pre_a2a: list[int],
    emb_dim_per_rank_per_feature: list[list[int]],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Like `alltoall_pooled`, where every feature has a batch size of its own.

    ``a2a_pooled_embs_tensor`` is flat: per destination, per feature of this rank, its ``[B, D]``
    block.  The other arguments are those of `VariableBatchAll2AllPooledInfo`.

    Returns:
        Awaitable, flat: per feature its ``[B, D]`` block, features in the order of the ranks.
    """
    info = VariableBatchAll2AllPooledInfo(
        batch_size_per_rank_per_feature,
        batch_size_per_feature_pre_a2a,
        emb_dim_per_rank_per_feature,
        codecs,
    )
    return start_exchange(group, info, (a2a_pooled_embs_tensor.reshape(-1),))
