"""Where the rows of tables lie in the records of a package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tessera.errors import UserError
from tessera.kernels.row_types import ROW_TYPES, RowType
from tessera.serving.package.devices import shard_of
from tessera.serving.package.manifest import Manifest
from tessera.serving.packaging.tables.stored import StoredPiece, lay_out


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of each stored row of a piece of a table: its elements, its scale, or both.

    Attributes:
        record: of the package.
        table: the table's name.
        offset: the record's byte at which the piece's first row begins.
        stride: bytes from one row to the next.
        width: bytes of a row.
        rows: of the piece.
    """

    record: str
    table: str
    offset: int
    stride: int
    width: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class TablePiece:
    """A piece of a table, and where it lies.

    Attributes:
        piece: its place in the shard's buffer.
        kind: the type of its rows.
        spans: all bytes of its rows.
        book: where the scales that its rows share begin and end in the record; None: they share none.
    """

    piece: StoredPiece
    kind: RowType
    spans: tuple[Span, ...]
    book: tuple[int, int] | None

    @property
    def table(self) -> str:
        """The table's name."""
        return self.piece.placement.table

    @property
    def record(self) -> str:
        """The package's record."""
        return self.spans[0].record


def table_pieces(
    manifest: Manifest, tensor_records: Mapping[str, str], sizes: Mapping[str, int]
) -> list[TablePiece]:
    """Every piece of every table.

    Args:
        manifest: the package's.
        tensor_records: by the name of the module's tensor, its record.
        sizes: bytes of the records.

    Raises:
        UserError: the package's tables lie in another way, as those of another Tessera might.
    """
    kinds = {table.name: ROW_TYPES[table.dtype] for table in manifest.tables}
    pieces, buffers = lay_out(manifest.plan.placements, kinds, for_gpu=manifest.device == "cuda")
    records = {}
    for shard, size in enumerate(buffers):
        found = {
            record
            for name, record in tensor_records.items()
            if shard_of(name) == shard and name.endswith("rows") and sizes.get(record) == size
        }
        if len(found) != 1:
            raise UserError(
                f"the tables of shard {shard} of the package cannot be found; package the model again"
            )
        records[shard] = found.pop()
    return [_place(piece, kinds[piece.placement.table], records, manifest) for piece in pieces]


def _place(
    piece: StoredPiece, kind: RowType, records: Mapping[int, str], manifest: Manifest
) -> TablePiece:
    data, header = kind.data_bytes(piece.dim), kind.header_bytes
    places = [(piece.data_offset, piece.data_stride, data)]
    if header:
        scale = piece.scale_offset
        if scale + header == piece.data_offset:
            places = [(scale, piece.scale_stride, header + data)]
        elif manifest.device == "cuda" and piece.scale_stride == piece.data_stride:
            places = [(piece.data_offset, piece.data_stride, scale + header - piece.data_offset)]
        else:
            places.append((scale, piece.scale_stride, header))
    spans = tuple(
        Span(
            record=records[piece.placement.shard],
            table=piece.placement.table,
            offset=offset,
            stride=stride,
            width=width,
            rows=piece.rows,
        )
        for offset, stride, width in places
    )
    book = (piece.scale_offset, piece.scale_offset + kind.book_bytes) if kind.blocks else None
    return TablePiece(piece=piece, kind=kind, spans=spans, book=book)
