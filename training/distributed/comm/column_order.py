"""In which order the columns of several ranks lie side by side.

Legend: W ranks, B own batch, D_r columns of rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


class ColumnOrder:
    """The columns of all ranks in an order of their own instead of rank by rank.

    Args:
        columns_per_rank: ``[W]``, D_r.
        pieces: rank, first of its columns and how many, in the wanted order; every column of
            every rank is in one piece.
    """

    def __init__(
        self, columns_per_rank: Sequence[int], pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        runs: list[list[int]] = []
        for rank, first, width in pieces:
            if runs and runs[-1][0] == rank and sum(runs[-1][1:]) == first:
                runs[-1][2] += width
            else:
                runs.append([rank, first, width])
        assert sum(width for _, _, width in runs) == sum(columns_per_rank), "pieces are complete"
        self._columns = list(columns_per_rank)
        self._widths = [width for _, _, width in runs]
        bounds = list(accumulate(columns_per_rank, initial=0))
        places = sorted(range(len(runs)), key=lambda run: bounds[runs[run][0]] + runs[run][1])
        self._places_by_rank = [
            [run for run in places if runs[run][0] == rank] for rank in range(len(self._columns))
        ]
        self.is_rank_by_rank = places == list(range(len(runs)))

    def _ordered(self, parts_by_rank: Sequence[Sequence[Tensor]]) -> Tensor:
        found: dict[int, Tensor] = {}
        for parts, places in zip(parts_by_rank, self._places_by_rank, strict=True):
            found.update(zip(places, parts, strict=True))
        return torch.cat([found[place] for place in range(len(found))], dim=1)

    def _widths_of(self, rank: int) -> list[int]:
        return [self._widths[place] for place in self._places_by_rank[rank]]

    def permute(self, matrix: Tensor) -> Tensor:
        """``[B, sum of D_r]`` rank by rank, in this order."""
        widths = [width for rank in range(len(self._columns)) for width in self._widths_of(rank)]
        parts = iter(matrix.split_with_sizes(widths, dim=1))
        return self._ordered([[next(parts) for _ in own] for own in self._places_by_rank])

    def join(self, flat: Tensor, rows: int) -> Tensor:
        """Blocks ``[rows, D_r]``, one after the other in ``flat``, side by side in this order."""
        blocks = flat.split_with_sizes([rows * columns for columns in self._columns])
        return self._ordered(
            [
                block.view(rows, columns).split_with_sizes(self._widths_of(rank), dim=1)
                for rank, (block, columns) in enumerate(zip(blocks, self._columns, strict=True))
            ]
        )

    def split(self, matrix: Tensor) -> Tensor:
        """Undo `join`: the blocks of ``matrix`` one after the other, flat."""
        rows = matrix.size(0)
        parts = matrix.split_with_sizes(self._widths, dim=1)
        flat = matrix.new_empty(matrix.numel())
        blocks = flat.split_with_sizes([rows * columns for columns in self._columns])
        for block, columns, places in zip(blocks, self._columns, self._places_by_rank, strict=True):
            if columns:
                torch.cat([parts[place] for place in places], dim=1, out=block.view(rows, columns))
        return flat
