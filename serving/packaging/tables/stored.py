"""Where the stored rows of tables are: pieces in the buffers of shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.kernels.row_types import RowType
from tessera.kernels.tables import scale_lies_beside
from tessera.serving.package.manifest import Placement, TableInfo

TABLE_ALIGNMENT_BYTES = 64
"""Every table begins at a multiple of this in its buffer: a cache line."""

GPU_ALIGNMENT_BYTES = 128
GPU_ROW_ALIGNMENT_BYTES = 16
GPU_SCALE_ALIGNMENT_BYTES = 4
"""What a thread of the CUDA kernels reads at a time."""


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """Where one piece of a table is in its shard's buffer.

    Row ``r`` of the piece has its elements at ``data_offset + r * data_stride`` and its scale and
    bias, if it has any, at ``scale_offset + r * scale_stride``; all in bytes.  Where rows are blocks,
    the table's book is at ``scale_offset``.
    """

    placement: Placement
    data_offset: int
    data_stride: int
    scale_offset: int
    scale_stride: int

    @property
    def rows(self) -> int:
        """Rows of the piece."""
        return self.placement.row_end - self.placement.row_begin

    @property
    def dim(self) -> int:
        """Columns of the piece."""
        return self.placement.column_end - self.placement.column_begin


@dataclass(frozen=True, kw_only=True)
class StoredTable:
    """One table: the manifest's entry, the type of its rows, and where its pieces are."""

    info: TableInfo
    kind: RowType
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTables:
    """All tables of a model, in the order given, in a buffer ``[bytes]`` uint8 per shard."""

    buffers: tuple[Tensor, ...]
    tables: tuple[StoredTable, ...]
    for_gpu: bool = False

    def table(self, name: str) -> StoredTable:
        """The table called ``name``."""
        return next(table for table in self.tables if table.info.name == name)

    def rows(self, piece: StoredPiece, kind: RowType) -> Tensor:
        """The stored rows of a piece ``[rows, row_bytes]`` uint8, scale and bias first."""
        return torch.cat(views(self.buffers[piece.placement.shard], piece, kind), dim=1)

    def values(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """What the lookups see of a table's rows from ``begin`` to before ``end``: ``[n, dim]`` float32."""
        table = self.table(name)
        end = table.info.rows if end is None else end
        values = torch.empty(end - begin, table.info.dim)
        for piece in table.pieces:
            at = piece.placement
            first, last = max(begin, at.row_begin), min(end, at.row_end)
            if first >= last:
                continue
            own = slice(first - at.row_begin, last - at.row_begin)
            both = views(self.buffers[at.shard], piece, table.kind)
            part = table.kind.decode(torch.cat([one[own] for one in both], dim=1), piece.dim)
            values[first - begin : last - begin, at.column_begin : at.column_end] = part
        return values


def lay_out(
    placements: Sequence[Placement], kinds: Mapping[str, RowType], *, for_gpu: bool
) -> tuple[list[StoredPiece], list[int]]:
    """The pieces' places, and the bytes of each shard's buffer."""
    table_alignment = GPU_ALIGNMENT_BYTES if for_gpu else TABLE_ALIGNMENT_BYTES
    sizes = [0] * (1 + max(placement.shard for placement in placements))
    pieces = []
    for at in placements:
        kind = kinds[at.table]
        rows, dim = at.row_end - at.row_begin, at.column_end - at.column_begin
        start = sizes[at.shard]
        header = kind.header_bytes
        if for_gpu:
            data_bytes = kind.data_bytes(dim)
            stride = _round_up(data_bytes, GPU_ROW_ALIGNMENT_BYTES)
            if header and scale_lies_beside(data_bytes, header):
                behind = _round_up(data_bytes, GPU_SCALE_ALIGNMENT_BYTES)
                stride = _round_up(behind + header, GPU_ROW_ALIGNMENT_BYTES)
                place = (start, stride, start + behind, stride)
                end = start + rows * stride
            else:
                scales = _round_up(start + rows * stride, table_alignment)
                place = (start, stride, scales if header or kind.blocks else 0, header)
                end = scales + rows * header + kind.book_bytes
        else:
            stride = kind.row_bytes(dim)
            end = start + rows * stride + kind.book_bytes
            scales = end - kind.book_bytes if kind.blocks else start if header else 0
            place = (start + header, stride, scales, stride if header else 0)
        names = ("data_offset", "data_stride", "scale_offset", "scale_stride")
        pieces.append(StoredPiece(placement=at, **dict(zip(names, place, strict=True))))
        sizes[at.shard] = _round_up(end, table_alignment)
    return pieces, sizes


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def views(buffer: Tensor, piece: StoredPiece, kind: RowType) -> tuple[Tensor, Tensor]:
    """Scales with biases ``[rows, 4 or 0]`` and elements ``[rows, data bytes]``."""
    header = buffer.as_strided(
        (piece.rows, kind.header_bytes), (piece.scale_stride, 1), piece.scale_offset
    )
    data = buffer.as_strided(
        (piece.rows, kind.data_bytes(piece.dim)), (piece.data_stride, 1), piece.data_offset
    )
    return header, data
