"""Rows of raw values to the parts of a request: what `PredictorClient.predict_rows` takes.

A row has the columns that training read: a number or nothing for a dense feature, an id, a text or a
list of them for a sparse one.  The model's schema says which column belongs to which feature,
which values are strings, and to how many ids training cut lists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tessera.errors import UserError
from tessera.kernels.string_ids import string_ids
from tessera.serving.client.arrays import Array, Bags
from tessera.serving.client.assemble import nearest
from tessera.serving.package.schema import FeatureSpec, InputSchema

Rows: TypeAlias = Any
"""A sequence of dictionaries, a pyarrow Table or RecordBatch, or a pandas DataFrame."""

_ID_MIN, _ID_MAX = -(2**63), 2**63 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_EXACT = 2**53
"""Whole numbers up to this are the same as floats, which pandas makes of integers with gaps."""

_BRACKETS = re.compile(r"^\s*\[\s*|\s*\]\s*\Z")
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,19}\s*")
_HEX = re.compile(r"[0-9a-fA-F]{1,8}")

Columns = dict[str, Sequence[Any]]


def rows_to_parts(
    rows: Rows, schema: InputSchema, *, ignore: Collection[str] = (), first_row: int = 0
) -> tuple[Array | None, dict[str, Bags]]:
    """What `assemble` takes: dense ``[B, F]`` float32 (None for a model without) and each feature's bags.

    Args:
        rows: ``B`` rows.  A column that is absent, null or NaN is a missing value or an empty bag.
            Columns that the training data had and that are not inputs, as labels are, are left out.
        schema: the model's inputs.
        ignore: more columns of the rows that are left out.
        first_row: the first row's number in messages.

    Raises:
        UserError: a column that the model does not have, or a value that it cannot take; the message names
            row and column.
    """
    dense_columns = [
        column or name
        for name, column in zip(
            schema.dense_features,
            schema.dense_columns or ("",) * len(schema.dense_features),
            strict=True,
        )
    ]
    known = {*dense_columns, *(_column(feature) for feature in schema.features)}
    known |= {feature.weights_column for feature in schema.features} - {""}
    numbers = {name for feature in schema.features if (name := feature.weights_column)}
    left_out = {*ignore, *(other.name for other in schema.other_columns)}
    count, columns = _columns_of(rows, known, left_out, numbers.union(dense_columns))
    if count == 0:
        raise UserError("there are 0 rows; give at least 1")
    dense = None
    try:
        if dense_columns:
            missing = schema.dense_missing == "nan"
            values = [_dense(n, columns.get(n), count, missing=missing) for n in dense_columns]
            dense = np.stack(values, axis=1)
        return dense, {feature.name: _bags(feature, columns, count) for feature in schema.features}
    except _RowError as error:
        raise UserError(f"row {first_row + error.number}, {error}") from None


def _column(feature: FeatureSpec) -> str:
    return feature.column or feature.name


def _columns_of(
    rows: Rows, known: set[str], ignored: set[str], numbers: set[str]
) -> tuple[int, Columns]:
    """The number of rows, and the values of each column that the model takes.

    ``numbers`` are the columns that hold no ids.
    """
    kind = type(rows).__module__.partition(".")[0]
    if kind == "pandas":
        import pyarrow as pa  # noqa: PLC0415 - only for those who have tables

        rows = pa.Table.from_pandas(rows, preserve_index=False)
        kind = "pyarrow"
    if kind == "pyarrow":
        names = rows.schema.names
        _refuse_unknown(names, known, ignored)
        return rows.num_rows, {
            name: _plain(rows.column(name), is_id=name not in numbers).to_pylist()
            for name in names
            if name in known
        }
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise UserError(
            f"rows is a {type(rows).__name__}; give a list of dictionaries, or a table of Arrow or pandas"
        )
    given = list(rows)
    names_seen: dict[str, None] = {}
    for number, row in enumerate(given):
        if not isinstance(row, Mapping):
            raise UserError(
                f"row {number} is a {type(row).__name__}; give a dictionary of its columns"
            )
        names_seen.update(dict.fromkeys(row))
    _refuse_unknown(names_seen, known, ignored)
    return len(given), {
        name: [row.get(name) for row in given] for name in names_seen if name in known
    }


def _plain(column: Any, *, is_id: bool) -> Any:
    """An Arrow column as training reads it, where Python's values would be others.

    Times are the numbers that they are stored as, unsigned ids wrap round, whole numbers in floating
    point are ids, and decimals are rounded to float32.
    """
    import pyarrow as pa  # noqa: PLC0415 - only for those who have tables

    kind = column.type
    many = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    of_one = kind.value_type if many else kind
    if pa.types.is_dictionary(of_one):
        return column
    target = None
    if pa.types.is_decimal(of_one) and not is_id:
        target = pa.float32()
    elif is_id and (pa.types.is_temporal(of_one) or pa.types.is_uint64(of_one)):
        narrow = pa.types.is_date32(of_one) or pa.types.is_time32(of_one)
        target = pa.int32() if narrow else pa.int64()
    if target is None:
        return column
    wanted = target if not many else pa.large_list(target)
    if many and pa.types.is_list(kind):
        wanted = pa.list_(target)
    return column.cast(wanted, safe=False)


def _refuse_unknown(names: Iterable[Any], known: set[str], ignored: set[str]) -> None:
    for name in names:
        if name not in known and name not in ignored:
            raise UserError(
                f"column {name!r} is not one of the model's; {nearest(str(name), known)}"
            )


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float | np.floating) and math.isnan(value))


def _dense(name: str, values: Sequence[Any] | None, count: int, *, missing: bool) -> Array:
    if values is None:
        values = [None] * count
    found = np.empty(count, np.float32)
    for number, value in enumerate(values):
        if _is_missing(value):
            if not missing:
                raise _RowError(
                    number,
                    f"column {name!r}: there is no value, and this model does not take missing ones",
                )
            found[number] = np.nan
            continue
        if not isinstance(value, int | float | np.number | np.bool_):
            raise _wrong(number, name, value, "a number")
        if not abs(value) <= _FLOAT32_MAX:
            raise _wrong(number, name, value, "a finite number of 32 bits")
        # A whole number is rounded once, as it is where a file has a column of them.
        found[number] = np.int64(value) if _is_wide_integer(value) else value
    return found


def _is_wide_integer(value: Any) -> bool:
    return isinstance(value, int) and _EXACT < abs(value) <= _ID_MAX


def _bags(feature: FeatureSpec, columns: Columns, count: int) -> Bags:
    name = _column(feature)
    cells = columns.get(name) or [None] * count
    weights = columns.get(feature.weights_column) or [None] * count
    lengths = np.zeros(count, np.int32)
    ids: list[Any] = []
    factors: list[float] = []
    for number, cell in enumerate(cells):
        weight_cell = weights[number] if feature.weights_column else None
        try:
            own, own_factors = _cell(feature, cell, weight_cell)
        except _CellError as error:
            raise _wrong(number, name, error.value, error.wanted) from None
        part = _part(feature, len(own))
        lengths[number] = len(own[part])
        ids += own[part]
        factors += own_factors[part]
    values = string_ids(ids) if feature.strings else np.array(ids, np.int64)
    scored = feature.group == "id_score_list"
    return Bags(lengths, values, np.array(factors, np.float32) if scored else None)


class _RowError(Exception):
    """What is wrong in the row with this number, from 0."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class _CellError(Exception):
    """A value that a feature cannot take, and what it takes."""

    def __init__(self, value: Any, wanted: str) -> None:
        super().__init__()
        self.value, self.wanted = value, wanted


def _part(feature: FeatureSpec, length: int) -> slice:
    """Which ids of a list of ``length`` training kept."""
    most = feature.max_length
    if most == 0 or length <= most:
        return slice(None)
    return slice(most) if feature.keep == "first" else slice(length - most, None)


def _cell(feature: FeatureSpec, cell: Any, weights: Any) -> tuple[list[Any], list[float]]:
    """The ids (or texts) of one cell and, for a feature with weights, their weights."""
    items = _items(_split(feature, cell))
    if not feature.many and len(items) > 1:
        raise _CellError(cell, "one value, not several")
    if feature.group == "id_list":
        there = [item for item in items if not (_is_missing(item) or (feature.hex and item == ""))]
        return [_id(feature, item) for item in there], []
    if feature.weights_column:
        factors = _items(weights)
        if len(factors) != len(items):
            raise _CellError(
                cell,
                f"as many values as column {feature.weights_column!r} has weights, {len(factors)}",
            )
        pairs = list(zip(items, factors, strict=True))
    else:
        pairs = [_pair(item) for item in items]
    if any(_is_missing(item) for item, _ in pairs):
        raise _CellError(cell, "an id for each weight")
    return [_id(feature, item) for item, _ in pairs], [_weight(factor) for _, factor in pairs]


def _split(feature: FeatureSpec, cell: Any) -> Any:
    """The items of a list that is a text, as training took them apart; any other cell as it is."""
    if not (feature.many and feature.separator and isinstance(cell, str)):
        return cell
    items = split_list(cell, feature.separator)
    return items if feature.strings else [whole_number(item) for item in items]


def split_list(text: str, separator: str) -> list[str]:
    """The items of a list that is a text: without brackets, and without quotes and spaces around them."""
    inner = _BRACKETS.sub("", text)
    return [item.strip(" '\"") for item in inner.split(separator)] if inner else []


def whole_number(text: str) -> Any:
    """The number that a text is in decimal digits; any other text as it is, which is then refused."""
    return int(text) if _INTEGER.fullmatch(text) else text


def _items(cell: Any) -> list[Any]:
    if _is_missing(cell):
        return []
    if isinstance(cell, Mapping):
        return list(cell.items())
    if isinstance(cell, list | tuple):
        return list(cell)
    if isinstance(cell, np.ndarray):
        return list(cell.tolist())
    return [cell]


def _pair(item: Any) -> tuple[Any, Any]:
    if isinstance(item, Mapping) and len(item) == 2:  # a struct of Arrow
        item = tuple(item.values())
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise _CellError(item, "a mapping of id to weight, or a list of pairs of them")
    return item[0], item[1]


def _weight(value: Any) -> float:
    if _is_missing(value):
        return 1.0  # as in training
    if isinstance(value, int | float | np.number) and abs(value) <= _FLOAT32_MAX:
        return float(value)
    raise _CellError(value, "a finite number for each weight")


def _id(feature: FeatureSpec, value: Any) -> Any:
    if feature.strings:
        if isinstance(value, bytes) or (isinstance(value, str) and _is_unicode(value)):
            return value
        raise _CellError(value, "a text or a list of texts")
    if feature.hex and isinstance(value, str | bytes):
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if not _HEX.fullmatch(text):
            raise _CellError(value, "1 to 8 hexadecimal digits, or a whole number")
        return int(text, 16)
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    if isinstance(value, int | np.integer | np.bool_) and _ID_MIN <= value <= _ID_MAX:
        return int(value)
    raise _CellError(value, "a whole number of 64 bits or a list of them")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(number: int, column: str, value: Any, wanted: str) -> _RowError:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    kind = type(value).__name__
    return _RowError(number, f"column {column!r}: found {shown} ({kind}); give {wanted}")
