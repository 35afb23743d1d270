"""Rectangles of a table: what the planner's and hand-written plans cut tables into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

Piece = tuple[list[int], list[int]]
"""Size ``[rows, columns]`` and offset ``[first row, first column]`` of a rectangle."""

MIN_CW_DIM = 32
"""Columns below which a block of columns is not cut further: 128 bytes of float32, two cache lines."""


@dataclass(frozen=True, kw_only=True)
class TableToCut:
    """Describes a table and the ranks among which it is cut."""

    rows: int
    columns: int
    world_size: int
    local_size: int  # ranks per node
    min_partition: int = 1  # the fewest columns of a block of columns

    @property
    def whole(self) -> Piece:
        """Return the whole table as one shard."""
        return [self.rows, self.columns], [0, 0]

    def widths(self, most: int) -> list[int]:
        """At most ``most`` widths of blocks that differ as little as multiples of 4 allow.

        Fused tables want rows of a multiple of 4 numbers, so only the last block may have another
        width.
        """
        blocks = max(1, min(self.columns // self.min_partition, most, -(-self.columns // 4)))
        width = -(-self.columns // blocks)
        width = -(-width // 4) * 4
        full, rest = divmod(self.columns, width)
        return [width] * full + ([rest] if rest else [])


def even_rows(rows: int, blocks: int) -> list[int]:
    """``ceil(rows / blocks)`` rows per block; the last blocks are smaller or empty."""
    size = -(-rows // blocks)
    return [max(0, min(size, rows - index * size)) for index in range(blocks)]


def row_blocks(rows: Sequence[int], columns: int, first_column: int = 0) -> list[Piece]:
    """Blocks of ``rows[i]`` rows, one below the other."""
    starts = accumulate(rows, initial=0)
    return [
        ([size, columns], [start, first_column]) for size, start in zip(rows, starts, strict=False)
    ]


def column_blocks(rows: int, widths: Sequence[int]) -> list[Piece]:
    """Blocks of ``widths[i]`` columns and all ``rows``, side by side."""
    starts = accumulate(widths, initial=0)
    return [([rows, width], [0, start]) for width, start in zip(widths, starts, strict=False)]


def grid_blocks(rows: int, widths: Sequence[int], blocks: int) -> list[Piece]:
    """Each block of columns cut evenly into ``blocks`` blocks of rows, one after the other."""
    return [
        piece
        for (_, width), (_, column) in column_blocks(rows, widths)
        for piece in row_blocks(even_rows(rows, blocks), width, column)
    ]
