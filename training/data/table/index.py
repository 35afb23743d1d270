"""What is known of every row before training: its labels, its weight and its split.

Made in one pass over only these columns, and kept in a prepared folder:

    labels.f32    ``[rows, L]``
    weights.f32   ``[rows]``, where there is a column of weights
    split.u8      ``[rows]``: 0 train, 1 validation, 2 test, 255 left out

Memory does not grow with the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tessera.errors import UserError
from tessera.training.data.malformed import MAX_EXAMPLES, MalformedReport, Progress
from tessera.training.data.prepared import PreparedFolder
from tessera.training.data.splits import draw_rows, split_sizes
from tessera.training.data.string_columns import is_string_type
from tessera.training.data.table.common import LINE_COLUMN, left_out
from tessera.training.data.table.decode import CellError, Floats, ids_of, numbers_of
from tessera.training.data.table.parquet import TableFile, Unit
from tessera.training.data.table.settle import TableColumns

TableSplit = Literal["random", "time", "hash", "files"]
Moment = str | int | float
Begins = tuple[Moment | None, Moment | None]
"""The first moment of the validation and of the test rows, as the config says it."""

LEFT_OUT = 255
_CHUNK = 1 << 20
_TEXTS_TIME = pa.timestamp("us")
_AFTER_ALL = 2**63 - 1
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))


@dataclass(frozen=True)
class RowIndex:
    """The arrays of an index, mapped from its files; without labels in them, every label is 1."""

    labels: Floats
    weights: Floats | None
    split: npt.NDArray[np.uint8]

    @classmethod
    def open(cls, folder: PreparedFolder) -> RowIndex:
        """The arrays in a folder that `write_index` wrote into."""

        def mapped(name: str, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
            if 0 in shape:
                return np.empty(shape, dtype)
            return np.asarray(np.memmap(folder.path / name, dtype, "r", shape=shape))

        rows, labels = folder.details["rows"], folder.details["labels"]
        return cls(
            labels=(
                mapped("labels.f32", "<f4", (rows, labels))
                if labels
                else np.broadcast_to(np.float32(1), (rows, 1))
            ),
            weights=mapped("weights.f32", "<f4", (rows,)) if folder.details["weights"] else None,
            split=mapped("split.u8", "u1", (rows,)),
        )


@dataclass(frozen=True, kw_only=True)
class SplitRule:
    """How rows are held out; the fields are those of `TableConfig`."""

    split: TableSplit
    held_out: tuple[float, float]
    seed: int
    begins: Begins = (None, None)

    @property
    def needs_keys(self) -> bool:
        """Whether rows are held out by the column that decides."""
        return any(self.held_out) or self.begins[0] is not None


def write_index(
    files: Sequence[TableFile],
    units: Sequence[Unit],
    columns: TableColumns,
    rule: SplitRule,
    *,
    folder: Path,
    progress: Progress,
) -> Mapping[str, Any]:
    """Write the index of a table's rows into the empty ``folder``.

    Returns:
        ``rows``, ``labels`` and ``weights``: how many rows and labels there are and whether the rows
        have weights; and ``malformed``, the report's JSON of rows without a label.

    Raises:
        UserError: a file is damaged, or the split's column cannot be read.
    """
    rows = sum(unit.rows for unit in units)
    labels = _array(folder / "labels.f32", "<f4", (rows, len(columns.labels)))
    weights = None
    if columns.weight is not None:
        weights = _array(folder / "weights.f32", "<f4", (rows,))
    split = _array(folder / "split.u8", "u1", (rows,))
    keys = None
    bounds = None
    if columns.split is not None and rule.needs_keys:
        if rule.begins[0] is not None and files:
            kind = files[0].schema.field(columns.split).type
            bounds = [first_key(begin, kind, columns.split) for begin in rule.begins]
        keys = _array(folder / "keys.i64", "<i8", (rows,))
    malformed = MalformedReport()
    for unit in units:
        file = files[unit.file]
        names = columns.row_names()
        if LINE_COLUMN in file.schema.names:
            names.append(LINE_COLUMN)
        table = file.read(unit.groups, names)
        part = slice(unit.first_row, unit.first_row + unit.rows)
        try:
            troubles = _read_unit(
                table,
                columns,
                labels[part],
                _part(weights, part),
                _part(keys, part),
                by_time=rule.split == "time",
            )
        except CellError as error:
            raise UserError(f"{file.source}: {error}") from error
        bad = np.zeros(unit.rows, np.bool_)
        for _, _, wrong in troubles:
            bad |= wrong
        split[part][bad] = LEFT_OUT
        malformed += _report(file, unit, table, troubles, bad)
        progress(unit.rows, malformed)
    _assign(split, keys, rule, bounds)
    details = {"rows": rows, "labels": len(columns.labels), "weights": weights is not None}
    if keys is not None:
        (folder / "keys.i64").unlink(missing_ok=True)
    return {**details, "malformed": malformed.to_json()}


def _array(path: Path, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    if 0 in shape:
        path.touch()
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "w+", shape=shape)


def _part(array: npt.NDArray[Any] | None, part: slice) -> npt.NDArray[Any] | None:
    return None if array is None else array[part]


_Trouble = tuple[str, str, npt.NDArray[np.bool_]]
"""A column, what was expected of it, and the rows of a unit where it is not so."""


def _read_unit(
    table: Any,
    columns: TableColumns,
    labels: npt.NDArray[Any],
    weights: npt.NDArray[Any] | None,
    keys: npt.NDArray[Any] | None,
    *,
    by_time: bool,
) -> list[_Trouble]:
    """Write a unit's part of the arrays; returns what is wrong with which of its rows."""
    troubles = []
    for place, (name, binary) in enumerate(columns.labels):
        values = numbers_of(table.column(name))
        labels[:, place] = values
        good = np.isfinite(values) if not binary else (values == 0) | (values == 1)
        expected = "0 or 1" if binary else "a finite number"
        troubles.append((name, expected, ~good))
    if weights is not None and columns.weight is not None:
        values = numbers_of(table.column(columns.weight))
        weights[:] = values
        troubles.append((columns.weight, "a weight of at least 0", ~(values >= 0)))
    if keys is not None and columns.split is not None:
        column = table.column(columns.split)
        values_of_keys, present = _keys_of(_times(column, columns.split) if by_time else column)
        keys[:] = values_of_keys
        if present is not None:
            troubles.append((columns.split, "a value, which decides the split", ~present))
    return troubles


def _times(column: Any, name: str) -> Any:
    """The column, and strings as the times that they say: their hashes have another order."""
    if not is_string_type(column.type):
        return column
    try:
        return column.cast(_TEXTS_TIME)
    except pa.ArrowInvalid as error:
        raise CellError(
            f"column {name!r} decides the split by time, but not every text in it is a date or a"
            f" time such as 2026-01-31 or 2026-01-31 18:30:00 ({str(error)[:100]})"
        ) from error


def first_key(begin: Moment | None, kind: Any, name: str) -> int:
    """The key of the moment ``begin`` in a column of the Arrow type ``kind``; None: after all.

    Raises:
        UserError: the column holds no such moments.
    """
    if begin is None:
        return _AFTER_ALL
    if is_string_type(kind):
        kind = _TEXTS_TIME
    expected = "a date or a time" if pa.types.is_temporal(kind) else "a number"
    cell = None
    if pa.types.is_temporal(kind) == isinstance(begin, str):
        naive = pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            cell = pa.array([begin]).cast(naive)
    if cell is None:
        raise UserError(
            f"valid_from or test_from is {begin!r}, but column {name!r} holds {str(kind)[:100]};"
            f" give {expected}"
        )
    keys, _ = _keys_of(pa.chunked_array([cell]))
    return int(keys[0])


def _keys_of(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    if pa.types.is_floating(column.type):
        values = column.to_numpy().astype(np.float64)
        # Ordered as the numbers are, also below 0.
        bits = values.view(np.int64)
        ordered = np.where(bits < 0, np.int64(-(2**63)) - bits, bits)
        return ordered, ~np.isnan(values)
    return ids_of(column)


def _report(
    file: TableFile,
    unit: Unit,
    table: Any,
    troubles: list[_Trouble],
    bad: npt.NDArray[np.bool_],
) -> MalformedReport:
    report = MalformedReport(int(bad.sum()))
    examples: list[Any] = []
    for row in np.flatnonzero(bad)[:MAX_EXAMPLES].tolist():
        name, expected, _ = next(trouble for trouble in troubles if trouble[2][row])
        number = unit.first_in_file + row + 1
        if LINE_COLUMN in table.column_names:
            number = table.column(LINE_COLUMN)[row].as_py()
        value = table.column(name)[row].as_py()
        reason = f"expected {expected}"
        examples += left_out(file.source, number, name, value, reason).examples
    return MalformedReport(report.total, tuple(examples))


def _assign(
    split: npt.NDArray[np.uint8],
    keys: npt.NDArray[np.int64] | None,
    rule: SplitRule,
    bounds: Sequence[int] | None,
) -> None:
    """Say of every row that is not left out which split it is in; it is 0 so far."""
    if keys is not None and bounds is not None:
        for number, bound in enumerate(bounds, start=1):
            if bound != _AFTER_ALL:
                _from_on(split, keys, bound, number)
        return
    if not any(rule.held_out):
        return
    if keys is not None:
        assign = _by_time if rule.split == "time" else _by_hash
        assign(split, keys, rule)
        return
    for _, valid, test in draw_rows(split_sizes(len(split), *rule.held_out), rule.seed):
        for number, rows in ((1, valid), (2, test)):
            kept = rows[split[rows] != LEFT_OUT]
            split[kept] = number


def _by_time(split: npt.NDArray[np.uint8], keys: npt.NDArray[np.int64], rule: SplitRule) -> None:
    """The last share is the test, the one before it validation; equal times are not parted."""
    kept = int(sum((split[a : a + _CHUNK] != LEFT_OUT).sum() for a in _starts(split)))
    train, valid, test = split_sizes(kept, *rule.held_out)
    for number, rank, size in ((1, train, valid), (2, train + valid, test)):
        if not size:
            continue
        _from_on(split, keys, int(_ranked(split, keys, rank)), number)


def _from_on(
    split: npt.NDArray[np.uint8], keys: npt.NDArray[np.int64], bound: int, number: int
) -> None:
    for start in _starts(split):
        part = split[start : start + _CHUNK]
        later = keys[start : start + _CHUNK] >= bound
        part[later & (part != LEFT_OUT)] = number


def _starts(array: npt.NDArray[Any]) -> range:
    return range(0, len(array), _CHUNK)


def _ranked(split: npt.NDArray[np.uint8], keys: npt.NDArray[np.int64], rank: int) -> np.int64:
    """The key of rank ``rank`` (from 0) among the rows that are kept, 16 bits a pass."""
    known, bits = np.uint64(0), 0
    while bits < 64:
        counts = np.zeros(1 << 16, np.int64)
        for start in _starts(split):
            kept = keys[start : start + _CHUNK][split[start : start + _CHUNK] != LEFT_OUT]
            ordered = kept.view(np.uint64) ^ np.uint64(1 << 63)
            if bits:
                ordered = ordered[ordered >> np.uint64(64 - bits) == known]
            digits = (ordered >> np.uint64(48 - bits)) & np.uint64(0xFFFF)
            counts += np.bincount(digits.astype(np.int64), minlength=1 << 16)
        before = np.cumsum(counts) - counts
        digit = int(np.searchsorted(before, rank, side="right")) - 1
        rank -= int(before[digit])
        known = (known << np.uint64(16)) | np.uint64(digit)
        bits += 16
    return np.int64((known ^ np.uint64(1 << 63)).astype(np.int64))


def _by_hash(split: npt.NDArray[np.uint8], keys: npt.NDArray[np.int64], rule: SplitRule) -> None:
    """Every value of the key goes to one split, by a hash of it and the seed."""
    valid, test = rule.held_out
    for start in _starts(split):
        mixed = _mixed(keys[start : start + _CHUNK].view(np.uint64), rule.seed)
        share = (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 53)
        part = split[start : start + _CHUNK]
        kept = part != LEFT_OUT
        part[kept & (share >= 1 - valid - test)] = 1
        part[kept & (share >= 1 - test)] = 2


def _mixed(keys: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Murmur3's 64-bit finalizer of the keys and the seed, each mixed once before."""
    mixed = _finalized(keys) ^ _finalized(np.array([seed + 1], np.uint64))
    return _finalized(mixed)


def _finalized(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for factor in _MIX:
        keys = (keys ^ (keys >> np.uint64(33))) * factor
    return keys ^ (keys >> np.uint64(33))
