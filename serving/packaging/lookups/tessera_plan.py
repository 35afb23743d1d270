"""Stored tables and features in the words of Tessera's operators (`tessera.kernels.tables`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tessera.errors import UserError
from tessera.kernels.plan import ID_RULES, OUT_OF_RANGE, OutOfRange, Pooling
from tessera.kernels.row_types import FLOAT8, RowType
from tessera.kernels.tables import MAX_ROWS, FeatureLookup, TablePlace
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.tables.stored import StoredPiece

POOLINGS = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "none": Pooling.SUM}


def columns_of(features: Sequence[FeatureSpec | None], names: Sequence[str]) -> dict[str, int]:
    """Each feature's first column where the features stand in the order of ``names``."""
    dims = {feature.name: feature.dim for feature in features if feature is not None}
    ends = list(accumulate(dims[name] for name in names))
    return {name: end - dims[name] for name, end in zip(names, ends, strict=True)}


def feature_lookup(
    feature: FeatureSpec, stored: tuple[StoredPiece, RowType], column: int
) -> FeatureLookup:
    """The operator's description of one feature over one piece of its table; see `table_place`."""
    return FeatureLookup(
        table=table_place(feature.table, *stored),
        out_column=column,
        pooling=POOLINGS[feature.pooling],
        id_rule=ID_RULES[feature.hashing],
        out_of_range=OUT_OF_RANGE[feature.out_of_range],
    )


def table_place(name: str, piece: StoredPiece, kind: RowType) -> TablePlace:
    """Where a piece lies, in the operator's words; a `UserError` if it has over `MAX_ROWS` rows."""
    if piece.rows > MAX_ROWS:
        raise UserError(
            f"table {name!r} has {piece.rows} rows in one piece; the tessera backend takes up to "
            f"{MAX_ROWS}: package with --backend fbgemm, or in several shards (--shards)"
        )
    return TablePlace(
        data_offset=piece.data_offset,
        row_stride=piece.data_stride,
        rows=piece.rows,
        dim=piece.dim,
        weight_type=kind,
        scale_offset=piece.scale_offset,
        scale_stride=piece.scale_stride,
        scale_type=kind.scale,
    )


def skipped(column: int) -> FeatureLookup:
    """A feature whose ids nobody asked for: of a table of one byte, of which no id but 0 is."""
    nothing = TablePlace(data_offset=0, row_stride=1, rows=1, dim=1, weight_type=FLOAT8)
    return FeatureLookup(table=nothing, out_column=column, out_of_range=OutOfRange.ZERO)
