"""Table layout: where each row, scale and feature of a lookup call lies.

A call's tables live in one uint8 buffer.  `pack_tables` lays them out and remembers each table's
`TablePlace`; `make_plan` turns places and per-feature rules into the int64 ``plan`` tensor that
every ``tessera::lookup*`` operator takes.  `tessera.kernels.plan` names its columns.

Shapes: ``R`` rows of a table, ``D`` its dimension, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.plan import (
    BOOK_SCALES,
    IdRule,
    OutOfRange,
    PlanRow,
    Pooling,
    ScaleType,
    scale_bytes,
)
from tessera.kernels.row_types import RowType, kernel_types

TABLE_ALIGNMENT_BYTES = 128
"""Every table and every scale array starts on a GPU's cache line (two of a CPU's)."""
MAX_ROWS = 2**31 - 1
TABLE_SCALE_SHIFT = 32
"""A scale shift under which all rows share one scale."""
DEFAULT_ROW_ALIGNMENT_BYTES = 16
"""The CUDA kernels read 16 bytes per thread where rows allow it."""
_SECTOR_BYTES = 32
"""What a GPU's cache fetches at least."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def scale_lies_beside(data_bytes: int, pair_bytes: int) -> bool:
    """Whether a GPU's table keeps each row's scale behind the row instead of all scales in an array of their own.

    It does where the padding of the row has room for it, and where row and scale fill one sector: cold rows then cost one
    access of the memory in place of two.  Longer rows would grow by their scale, and the scales of frequent rows lie
    closer together apart from them (NOTES.md, "Where a scale lies").

    Args:
        data_bytes: of a row.
        pair_bytes: of its scale and bias.
    """
    apart = _round_up(data_bytes, DEFAULT_ROW_ALIGNMENT_BYTES)
    beside = _round_up(_round_up(data_bytes, 4) + pair_bytes, DEFAULT_ROW_ALIGNMENT_BYTES)
    return beside in (apart, _SECTOR_BYTES)


def scale_count(rows: int, scale_shift: int) -> int:
    """How many pairs of scale and bias ``rows`` rows need."""
    return ((rows - 1) >> scale_shift) + 1


@dataclass(frozen=True, kw_only=True)
class TableRows:
    """One table as rows of bytes.

    Attributes:
        data: uint8 ``[R, weight_type.data_bytes(dim)]``.
        weight_type: what the bytes are.
        dim: columns.
        scale: fp16 or fp32 ``[S, 2]``, pairs of scale and bias, or None where the bytes are the
            values.  Row r uses pair ``r >> scale_shift``.  Of rows in blocks: fp32 ``[16]``, the
            table's book.
        scale_shift: 0 for a pair per row; k for one per ``2**k`` neighbouring rows;
            `TABLE_SCALE_SHIFT` for one pair, ``S = 1``.
    """

    data: Tensor
    weight_type: RowType
    dim: int
    scale: Tensor | None = None
    scale_shift: int = 0

    def __post_init__(self) -> None:
        expected = self.weight_type.data_bytes(self.dim) if self.dim >= 1 else 0
        if self.dim < 1 or self.data.dim() != 2 or self.data.shape[1] != expected:
            raise UserError(
                f"data: {list(self.data.shape)} is not [rows, {expected}], the bytes of "
                f"{self.weight_type.name} rows with dim={self.dim}"
            )
        if self.data.dtype != torch.uint8 or self.data.shape[0] < 1:
            raise UserError(
                f"data: uint8 with at least one row is needed, got {self.data.dtype} "
                f"{list(self.data.shape)}"
            )
        if self.weight_type.scaled and not self.weight_type.scale_optional and self.scale is None:
            raise UserError(f"scale: {self.weight_type.name} rows need one; quantize the table")
        if self.rows > MAX_ROWS:
            raise UserError(f"data: {self.rows} rows are more than {MAX_ROWS}; split the table")
        if self.weight_type.blocks:
            self._check_book()
        elif self.scale is not None and (
            self.scale.dtype not in (torch.float16, torch.float32)
            or self.scale.dim() != 2
            or self.scale.shape[1] != 2
            or self.scale.shape[0] != scale_count(self.rows, self.scale_shift)
        ):
            raise UserError(
                f"scale: float16 or float32 [{scale_count(self.rows, self.scale_shift)}, 2] is "
                f"needed for {self.rows} rows with scale_shift={self.scale_shift}, got "
                f"{self.scale.dtype} {list(self.scale.shape)}"
            )

    def _check_book(self) -> None:
        if (
            self.scale is None
            or self.scale.dtype != torch.float32
            or tuple(self.scale.shape) != (BOOK_SCALES,)
            or self.scale_shift != 0
        ):
            found = None if self.scale is None else (self.scale.dtype, list(self.scale.shape))
            raise UserError(
                f"scale: {self.weight_type.name} rows need float32 [{BOOK_SCALES}] and scale_shift=0, got "
                f"{found} and scale_shift={self.scale_shift}"
            )

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.data.shape[0])


@dataclass(frozen=True, kw_only=True)
class TablePlace:
    """Where a table lies in the weight buffer; all offsets and strides in bytes."""

    data_offset: int
    row_stride: int
    rows: int
    dim: int
    weight_type: RowType
    scale_offset: int = 0
    scale_stride: int = 0
    scale_type: ScaleType = ScaleType.NONE
    scale_shift: int = 0


@dataclass(frozen=True, kw_only=True)
class FeatureLookup:
    """One feature: its table, its rules and where its vector goes.

    Attributes:
        table: the table's place.
        out_column: first output column (elements).
        pooling: sum or mean.
        id_rule: how a raw id becomes a row.
        out_of_range: what happens to an id that is not a row, under `IdRule.NONE`.
        expected_ids: about how many ids a bag holds.  A GPU starts the features with the longest
            bags first, so that none of them is left running alone at the end; values never
            depend on it.
    """

    table: TablePlace
    out_column: int
    pooling: Pooling = Pooling.SUM
    id_rule: IdRule = IdRule.NONE
    out_of_range: OutOfRange = OutOfRange.CLAMP
    expected_ids: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PackedTables:
    """Tables in one buffer.

    Attributes:
        weights: uint8 ``[bytes]``.
        places: one per table, in the order given to `pack_tables`.
    """

    weights: Tensor
    places: tuple[TablePlace, ...]


def _scale_type(table: TableRows) -> ScaleType:
    if table.scale is None:
        return ScaleType.NONE
    if table.weight_type.blocks:
        return ScaleType.BOOK
    return ScaleType.FLOAT16 if table.scale.dtype == torch.float16 else ScaleType.FLOAT32


def _place_table(
    table: TableRows, start: int, *, scale_beside: bool | None, row_alignment: int
) -> tuple[TablePlace, int]:
    """The table's place from byte ``start`` on, and the first byte after it."""
    data_bytes = table.weight_type.data_bytes(table.dim)
    scale_type = _scale_type(table)
    pair_bytes = scale_bytes(scale_type)
    place = TablePlace(
        data_offset=start,
        row_stride=_round_up(data_bytes, row_alignment),
        rows=table.rows,
        dim=table.dim,
        weight_type=table.weight_type,
        scale_type=scale_type,
        scale_shift=table.scale_shift,
    )
    by_row = scale_type in (ScaleType.FLOAT16, ScaleType.FLOAT32) and table.scale_shift == 0
    if scale_beside is None:
        scale_beside = scale_lies_beside(data_bytes, pair_bytes)
    if scale_beside and by_row:
        # A GPU copies a pair of fp16 as one word.
        scale_at = _round_up(data_bytes, 4)
        stride = _round_up(scale_at + pair_bytes, row_alignment)
        place = replace(
            place, row_stride=stride, scale_offset=start + scale_at, scale_stride=stride
        )
        return place, start + stride * table.rows
    end = start + place.row_stride * table.rows
    if scale_type is not ScaleType.NONE:
        scale_offset = _round_up(end, TABLE_ALIGNMENT_BYTES)
        if scale_type is ScaleType.BOOK:
            return replace(place, scale_offset=scale_offset), scale_offset + pair_bytes
        place = replace(place, scale_offset=scale_offset, scale_stride=pair_bytes)
        end = scale_offset + pair_bytes * scale_count(table.rows, table.scale_shift)
    return place, end


def pack_tables(
    tables: Sequence[TableRows],
    *,
    scale_beside: bool | None = False,
    row_alignment: int = DEFAULT_ROW_ALIGNMENT_BYTES,
) -> PackedTables:
    """Lay tables out in one buffer on the first table's device.

    Args:
        tables: at least one; all on one device.
        scale_beside: put a row's scale behind its data instead of in an array of its own; None: as
            `scale_lies_beside` says of each table.
        row_alignment: rows start on multiples of this many bytes.

    Raises:
        UserError: no table, or a non-positive alignment.
    """
    if not tables:
        raise UserError("tables: there is none; give at least one")
    if row_alignment < 1:
        raise UserError(f"row_alignment: {row_alignment} is not a number of bytes >= 1")
    places = []
    end = 0
    for table in tables:
        start = _round_up(end, TABLE_ALIGNMENT_BYTES)
        place, end = _place_table(
            table, start, scale_beside=scale_beside, row_alignment=row_alignment
        )
        places.append(place)
    # Whole vectors may be read from the last row: end on a full line.
    weights = torch.zeros(
        _round_up(end, TABLE_ALIGNMENT_BYTES), dtype=torch.uint8, device=tables[0].data.device
    )
    for table, place in zip(tables, places, strict=True):
        _write_table(weights, table, place)
    return PackedTables(weights=weights, places=tuple(places))


def _write_table(weights: Tensor, table: TableRows, place: TablePlace) -> None:
    data_bytes = table.data.shape[1]
    rows = torch.as_strided(
        weights, (place.rows, data_bytes), (place.row_stride, 1), place.data_offset
    )
    rows.copy_(table.data)
    if table.scale is not None:
        # A book is one entry of 64 bytes.
        scale = table.scale.contiguous().view(torch.uint8)
        scale = scale.view(1, -1) if scale.dim() == 1 else scale
        target = torch.as_strided(
            weights, tuple(scale.shape), (place.scale_stride, 1), place.scale_offset
        )
        target.copy_(scale)


def from_fbgemm_rows(rows: Tensor, *, dim: int, weight_type: RowType) -> TableRows:
    """Convert rows in FBGEMM's inference layout.

    Args:
        rows: uint8 ``[R, stride]``.  int8 and int4: fp16 scale, fp16 bias, then the data; fp16
            and fp32: the data.  Padding at the end is dropped.
        dim: columns.
        weight_type: INT8, INT4, FLOAT16 or FLOAT32.

    Raises:
        UserError: the type has no such layout, or the rows are too short.
    """
    data_bytes = weight_type.data_bytes(dim)
    header = weight_type.header_bytes
    if weight_type.fbgemm_code is None:
        raise UserError(f"weight_type: FBGEMM has no row layout for {weight_type.name}")
    if rows.dim() != 2 or rows.shape[1] < header + data_bytes:
        raise UserError(
            f"rows: {list(rows.shape)} is too short for {header + data_bytes} bytes a row"
        )
    data = rows[:, header : header + data_bytes].contiguous()
    scale = rows[:, :header].contiguous().view(torch.float16) if header else None
    return TableRows(data=data, weight_type=weight_type, dim=dim, scale=scale)


def fbgemm_place(
    *, offset: int, row_stride: int, rows: int, dim: int, weight_type: RowType
) -> TablePlace:
    """The place of a table that stays in FBGEMM's layout, ``offset`` bytes into its buffer."""
    return TablePlace(
        data_offset=offset + weight_type.header_bytes,
        row_stride=row_stride,
        rows=rows,
        dim=dim,
        weight_type=weight_type,
        scale_offset=offset,
        scale_stride=row_stride if weight_type.scaled else 0,
        scale_type=weight_type.scale,
    )


def make_plan(features: Sequence[FeatureLookup]) -> Tensor:
    """The ``plan`` of a call: int64 ``[F, PLAN_COLUMNS]`` on the CPU (move it beside the weights).

    Raises:
        UserError: there is no feature, or one of rows that no kernel reads.
    """
    if not features:
        raise UserError("features: there is none; a lookup needs at least one")
    order = sorted(range(len(features)), key=lambda f: -features[f].expected_ids)
    rows = []
    for feature, launched in zip(features, order, strict=True):
        place = feature.table
        reciprocal = (2**64 - 1) // place.rows
        row = PlanRow(
            data_offset=place.data_offset,
            row_stride=place.row_stride,
            rows=place.rows,
            dim=place.dim,
            weight_type=_kernel_number(place.weight_type),
            scale_offset=place.scale_offset,
            scale_stride=place.scale_stride,
            scale_type=int(place.scale_type),
            out_column=feature.out_column,
            pooling=int(feature.pooling),
            id_rule=int(feature.id_rule),
            out_of_range=int(feature.out_of_range),
            reciprocal=reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal,
            scale_shift=place.scale_shift,
            launch_order=launched,
        )
        rows.append(row)
    return torch.tensor(rows, dtype=torch.int64)


def _kernel_number(weight_type: RowType) -> int:
    if weight_type.kernel_number is None:
        raise UserError(
            f"weight_type: no kernel reads {weight_type.name} rows; take one of "
            f"{', '.join(kind.name for kind in kernel_types())}"
        )
    return weight_type.kernel_number
