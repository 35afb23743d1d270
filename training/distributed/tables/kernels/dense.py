"""Tables that an ordinary optimizer trains, with one dense gradient for all of them."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.flat_parameter import FlatParameter
from tessera.training.distributed.tables.kernels.interfaces import TableGroup
from tessera.training.distributed.tables.kernels.row_blocks import BlockLookup, RowBlocks


class DenseTables(nn.Module):
    """Tables with dense gradients, as data-parallel training needs them.

    Attributes:
        flat: all tables, zeros at first: the one parameter of this module.
        weights: per table ``[local_rows, local_cols]``, parameters in the memory of ``flat``
            (`FlatParameter`).
    """

    def __init__(self, group: TableGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self._group = group
        self._by_cols = RowBlocks(group)
        self._sizes = [sum(block.rows) * block.cols for block in self._by_cols.blocks]
        flat = nn.Parameter(torch.zeros(sum(self._sizes), dtype=dtype, device=group.device))
        views = self._by_cols.per_table(self._block_parts(flat.detach()))
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
        blocks = self._block_parts(self.flat.detach())

        def run(number: int, own: Bags) -> Tensor:
            add = partial(self._add_gradient, number)
            return BlockLookup(blocks[number], self._group, add).run(self.flat, own)

        return self._by_cols.look_up(bags, run)

    @torch.no_grad()
    def _add_gradient(self, number: int, rows_U: Tensor, summed_UD: Tensor) -> None:
        """Add to the tables' gradient where it lies."""
        whole = self._block_parts(self._parameter.gradient())[number]
        before = whole.index_select(0, rows_U)
        whole.index_copy_(0, rows_U, before.add_(summed_UD))
