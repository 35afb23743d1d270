"""Tables that an ordinary optimizer trains, with one dense gradient for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.flat_parameter import FlatParameter
from tessera.training.distributed.tables.kernels.row_blocks import (
    BlockBags,
    RowBlocks,
    look_up_rows,
    row_gradients,
)
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable


class DenseTables(nn.Module):
    """Tables with dense gradients, as data-parallel training needs them.

    Args:
        tables: the shards; features come in their order.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum; without per-id weights.
        dtype: of the rows.
        device: where the tables live.

    Attributes:
        flat: all tables, zeros at first: the one parameter of this module.
        weights: per table ``[local_rows, local_cols]``, parameters in the memory of ``flat``
            (`FlatParameter`).
    """

    def __init__(
        self,
        tables: Sequence[ShardedEmbeddingTable],
        *,
        pooled: bool,
        mean: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._pooled, self._mean = pooled, mean
        self._by_cols = RowBlocks(tables, pooled=pooled, device=device)
        self._sizes = [sum(block.rows) * block.cols for block in self._by_cols.blocks]
        flat = nn.Parameter(torch.zeros(sum(self._sizes), dtype=dtype, device=device))
        views: list[Tensor] = [torch.empty(0)] * len(tables)
        for block, part in zip(self._by_cols.blocks, self._block_parts(flat.detach()), strict=True):
            for place, view in zip(block.tables, part.split(block.rows), strict=True):  # type: ignore[no-untyped-call] # torch leaves it untyped
                views[place] = view
        self._hold(FlatParameter(flat, views))

    def _hold(self, parameter: FlatParameter) -> None:
        self._parameter = parameter
        self.flat = parameter.flat

    @property
    def weights(self) -> list[nn.Parameter]:
        """Return the parameter of each table."""
        return self._parameter.tables

    def _block_parts(self, flat: Tensor) -> list[Tensor]:
        """What belongs to each block, ``[rows, D]``, of a tensor that is laid out as the tables."""
        return [
            part.view(-1, block.cols)
            for part, block in zip(
                flat.split_with_sizes(self._sizes), self._by_cols.blocks, strict=True
            )
        ]

    def forward(self, bags: Bags) -> Tensor:
        """``[B, sum of D]``, or unpooled ``[N, D]``; ids must be rows."""

        def run(number: int, own: BlockBags) -> Tensor:
            vectors: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
                self.flat, self, number, own.rows, own.offsets, own.weights
            )
            return vectors

        return self._by_cols.look_up(bags.ids, bags.offsets, bags.weights, run)

    def look_up_block(self, number: int, bags: BlockBags) -> Tensor:
        """``[bags, D]`` (pooled) or ``[N, D]`` of the tables of one row length."""
        weight = self._block_parts(self.flat.detach())[number]
        return look_up_rows(weight, bags, pooled=self._pooled, mean=self._mean)

    @torch.no_grad()
    def add_gradient(
        self, number: int, bags: BlockBags, gradient: Tensor, *, of_weights: bool
    ) -> Tensor | None:
        """Add to the tables' gradient where it lies; the gradient of the ids' weights, if wanted."""
        found = row_gradients(
            self._block_parts(self.flat.detach())[number],
            bags,
            gradient,
            pooled=self._pooled,
            mean=self._mean,
            of_weights=of_weights,
        )
        whole = self._block_parts(self._parameter.gradient())[number]
        rows = found.rows
        before = whole.index_select(0, rows)
        whole.index_copy_(0, rows, before.add_(found.summed))
        return found.weights


class _Lookup(Function):
    """`DenseTables.look_up_block`; the flat parameter is an argument so that autograd comes by."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd calls it by position
        ctx: Any,
        flat: Tensor,
        tables: DenseTables,
        number: int,
        rows_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        del flat
        ctx.tables, ctx.number = tables, number
        ctx.save_for_backward(rows_N, offsets, weights_N)
        return tables.look_up_block(number, BlockBags(rows_N, offsets, weights_N))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_weights = ctx.tables.add_gradient(
            ctx.number,
            BlockBags(*ctx.saved_tensors),
            gradient,
            of_weights=ctx.needs_input_grad[5],
        )
        return None, None, None, None, None, of_weights
