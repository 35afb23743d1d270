"""The columns that slices, groups, clusters and weights are read from, along with the batches.

Of a table they are read as they lie in its files, so that slices have the values' own names; of any other
data they are the features of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tessera.errors import UserError
from tessera.serving.offline.evaluation.data import Opened, source_of
from tessera.training.data.batch import Batch
from tessera.training.data.criteo import CriteoDataset
from tessera.training.data.formats.table import TableConfig
from tessera.training.data.string_columns import arrow_string_ids, is_string_type
from tessera.training.data.table.view import TableDataset

MOST_VALUES = 1 << 20
"""Different values of a column that slices tell apart; of more, the later ones are one value."""

_REST = "(other values)"
_MISSING = "(missing)"


class Reader:
    """The values of some columns for the rows of a batch.

    Args:
        opened: the data.
        names: columns, by their names in the files or the features' names.

    Raises:
        UserError: there is no such column.
    """

    def __init__(self, opened: Opened, names: Sequence[str]) -> None:
        self._columns = opened.columns
        self._dataset = opened.view.dataset
        self._sources: dict[str, str] = {}
        if isinstance(self._dataset, TableDataset) and isinstance(opened.config, TableConfig):
            self._sources = {name: source_of(opened.config.columns, name) for name in names}
            starts = [unit.first_row for unit in self._dataset.units]
            self._starts = np.array(starts, np.int64)
        else:
            there = {*self._columns.dense_names, *self._columns.sparse_names}
            for name in names:
                if name not in there:
                    raise UserError(
                        f"column {name!r}: the data has no such column; it has"
                        f" {', '.join(sorted(there)[:20])}"
                    )
        self._names = tuple(names)
        self._held: tuple[int, Any] | None = None

    def of(self, batch: Batch) -> dict[str, Any]:
        """An Arrow array ``[B]`` for each column, null where it is missing.

        The rows of successive batches ascend.
        """
        if not self._names:
            return {}
        if self._sources:
            assert batch.row_numbers is not None, "the loader numbers rows"
            return self._of_table(batch.row_numbers.numpy())
        return {name: self._of_batch(batch, name) for name in self._names}

    def _of_table(self, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        units = np.searchsorted(self._starts, rows, side="right") - 1
        parts: dict[str, list[Any]] = {name: [] for name in self._names}
        for unit in np.unique(units).tolist():
            table = self._unit(unit)
            places = pa.array(rows[units == unit] - int(self._starts[unit]))
            for name in self._names:
                column = table.column(self._sources[name]).take(places)
                parts[name] += [_plain(chunk) for chunk in column.chunks]
        return {name: pa.concat_arrays(chunks) for name, chunks in parts.items()}

    def _unit(self, number: int) -> Any:
        if self._held is None or self._held[0] != number:
            assert isinstance(self._dataset, TableDataset)
            self._held = None
            unit = self._dataset.units[number]
            wanted = list(dict.fromkeys(self._sources.values()))
            table = self._dataset.files[unit.file].read(unit.groups, wanted)
            self._held = (number, table)
        return self._held[1]

    def _of_batch(self, batch: Batch, name: str) -> Any:
        if name in self._columns.dense_names:
            values = batch.dense_features[:, self._columns.dense_names.index(name)].numpy()
            return pa.array(values.astype(np.float64), from_pandas=True)
        bags = batch.sparse_features[name]
        lengths = bags.lengths().numpy()
        if len(lengths) and int(lengths.max()) > 1:
            raise UserError(
                f"column {name!r}: has lists of values, and a slice or group needs one value a row"
            )
        ids = np.zeros(len(lengths), np.int64)
        ids[lengths > 0] = bags.values().numpy()
        if isinstance(self._dataset, CriteoDataset):  # as its files write them
            texts = [
                f"{one & 0xFFFFFFFF:08x}" if n else None
                for one, n in zip(ids, lengths, strict=True)
            ]
            return pa.array(texts, pa.string())
        return pa.array(ids, mask=lengths == 0)


def _plain(array: Any) -> Any:
    kind = array.type
    if pa.types.is_dictionary(kind):
        array = array.dictionary_decode()
        kind = array.type
    if pa.types.is_nested(kind):
        raise UserError(
            "a slice, group or weight column has lists of values, and it must have one value a row"
        )
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return array.cast(pa.string())
    return array


class Keys:
    """Collects a column of groups or clusters: ``8`` bytes a row."""

    def __init__(self, rows: int) -> None:
        self._keys = np.zeros(rows, np.int64)
        self._missing = np.zeros(rows, np.bool_)
        self._filled = 0

    def add(self, array: Any) -> None:
        """Add the values of a batch."""
        stop = self._filled + len(array)
        part = slice(self._filled, stop)
        self._missing[part] = array.is_null().to_numpy(zero_copy_only=False)
        if is_string_type(array.type):
            self._keys[part] = arrow_string_ids(array)
        elif pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
            numbers = array.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
            self._keys[part] = numbers.astype(np.float64).view(np.int64)
        else:
            self._keys[part] = _integers(array)
        self._filled = stop

    def codes(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """``[N]`` integers from 0, equal where the values are; and ``[N]``, where there is no value.

        A row without a value has a number of its own.
        """
        keys, missing = self._keys[: self._filled], self._missing[: self._filled]
        _, codes = np.unique(keys, return_inverse=True)
        codes = codes.reshape(-1).astype(np.int64)
        codes[missing] = codes.max(initial=0) + 1 + np.arange(int(missing.sum()))
        return np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64), missing


class Weights:
    """Collects a column of sample weights: ``8`` bytes a row."""

    def __init__(self, rows: int, name: str) -> None:
        self._values = np.zeros(rows)
        self._name = name
        self._filled = 0

    def add(self, array: Any) -> None:
        """Add the values of a batch.

        Raises:
            UserError: one is missing, negative, or no finite number.
        """
        numbers = _numbers(array)
        if numbers is None or not bool(np.all(np.isfinite(numbers) & (numbers >= 0))):
            raise UserError(
                f"--weight {self._name}: a row's weight is missing, negative or no number; give a column"
                " of numbers of at least 0"
            )
        self._values[self._filled : self._filled + len(array)] = numbers
        self._filled += len(array)

    def values(self) -> npt.NDArray[np.float64]:
        """``[N]`` weights."""
        return self._values[: self._filled]


class Values:
    """Collects a column that slices are cut by: ``8`` bytes a row, and its different values.

    Numbers with a fraction, times and dense features are numeric, and so are texts that all are one of
    these, if there are more than can be shown; anything else has values.
    """

    def __init__(self, rows: int, name: str, *, numeric: bool, buckets: int, top: int) -> None:
        self.name = name
        self._numeric, self._buckets, self._top = numeric, buckets, top
        self._time: Any = None
        self._numbers = np.full(rows if numeric else 0, np.nan)
        self._codes = np.zeros(0 if numeric else rows, np.int64)
        self._rows = rows
        self._known: dict[Any, int] = {None: 0}
        self._filled = 0

    def add(self, array: Any) -> None:
        """Add the values of a batch."""
        kind = array.type
        if self._filled == 0 and not self._numeric:
            floats = pa.types.is_floating(kind) or pa.types.is_decimal(kind)
            if floats or pa.types.is_temporal(kind):
                self._numeric, self._numbers = True, np.full(self._rows, np.nan)
                self._codes = self._codes[:0]
        if pa.types.is_temporal(kind):
            self._time = kind
        part = slice(self._filled, self._filled + len(array))
        self._filled += len(array)
        if self._numeric:
            numbers = _numbers(array)
            if numbers is None:
                raise UserError(f"--by {self.name}: holds texts and numbers; make it one of both")
            self._numbers[part] = numbers
            return
        encoded = array.dictionary_encode()
        codes = [self._code(value) for value in encoded.dictionary.to_pylist()]
        places = encoded.indices.fill_null(len(codes)).to_numpy(zero_copy_only=False)
        self._codes[part] = np.array([*codes, 0], np.int64)[places]

    def _code(self, value: Any) -> int:
        if value not in self._known and len(self._known) > MOST_VALUES:
            value = _REST
        return self._known.setdefault(value, len(self._known))

    def slices(self) -> list[tuple[str, npt.NDArray[np.intp]]]:
        """The slices by name, each with the places of its rows; those without rows are left out."""
        if not self._numeric:
            numbers = self._as_numbers()
            if numbers is None:
                return self._by_value()
            return self._by_bucket(numbers)
        return self._by_bucket(self._numbers[: self._filled])

    def _as_numbers(self) -> npt.NDArray[np.float64] | None:
        """The values of texts as numbers, if there are too many to show and all are numbers or times."""
        if len(self._known) - 1 <= max(self._top, self._buckets) or _REST in self._known:
            return None
        values = list(self._known)  # the first stands for those that are missing
        if not all(isinstance(value, str) for value in values[1:]):
            return None  # integers that are ids, as far as one can see
        texts = pa.array(values, pa.string())
        numbers = _numbers(texts)
        if numbers is None:
            try:
                texts = texts.cast(pa.timestamp("us"))
            except pa.ArrowInvalid:
                return None
            self._time = texts.type
            numbers = _numbers(texts)
        elif bool(np.all(numbers[1:] == np.trunc(numbers[1:]))):
            return None
        assert numbers is not None, "times are numbers"
        return numbers[self._codes[: self._filled]]

    def _by_value(self) -> list[tuple[str, Any]]:
        codes = self._codes[: self._filled]
        counts = np.bincount(codes, minlength=len(self._known))
        names = list(self._known)
        if _REST in self._known:
            counts[self._known[_REST]] = 0
        shown = [
            code
            for code in np.argsort(-counts, kind="stable")[: self._top].tolist()
            if counts[code]
        ]
        found: list[tuple[str, Any]] = [
            (_MISSING if names[code] is None else _text(names[code]), np.flatnonzero(codes == code))
            for code in shown
        ]
        rest = np.flatnonzero(~np.isin(codes, shown))
        if len(rest):
            left = int(np.count_nonzero(counts)) - len(shown)
            found.append((f"(the rest: {left:,} values)", rest))
        return found

    def _by_bucket(self, numbers: npt.NDArray[np.float64]) -> list[tuple[str, Any]]:
        present = numbers[~np.isnan(numbers)]
        different = np.unique(present)
        found: list[tuple[str, Any]] = []
        if len(different) <= self._buckets:
            found = [(self._shown(one), np.flatnonzero(numbers == one)) for one in different]
        else:
            shares = np.linspace(0, 1, self._buckets + 1)[1:-1]
            bounds = np.unique(np.quantile(present, shares, method="inverted_cdf"))
            place = np.searchsorted(bounds, numbers, side="left")
            place[np.isnan(numbers)] = -1
            ends = [self._shown(bound) for bound in bounds]
            for number in range(len(bounds) + 1):
                rows = np.flatnonzero(place == number)
                if not len(rows):
                    continue
                if number == 0:
                    name = f"up to {ends[0]}"
                elif number == len(bounds):
                    name = f"above {ends[-1]}"
                else:
                    name = f"{ends[number - 1]} to {ends[number]}"
                found.append((name, rows))
        missing = np.flatnonzero(np.isnan(numbers))
        return [*found, (_MISSING, missing)] if len(missing) else found

    def _shown(self, number: float) -> str:
        if self._time is not None and not pa.types.is_duration(self._time):
            unit = pa.int32() if self._time.bit_width == 32 else pa.int64()
            return str(pa.scalar(int(number), unit).cast(self._time).as_py())
        return f"{number:.6g}"


def _text(value: Any) -> str:
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _integers(array: Any) -> npt.NDArray[np.int64]:
    if pa.types.is_boolean(array.type) or pa.types.is_temporal(array.type):
        narrow = pa.types.is_date32(array.type) or pa.types.is_time32(array.type)
        array = array.cast(pa.int32() if narrow else pa.int64())
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64)
    whole = array.cast(pa.int64(), safe=False).fill_null(0)
    numbers: npt.NDArray[np.int64] = whole.to_numpy(zero_copy_only=False)
    return numbers


def _numbers(array: Any) -> npt.NDArray[np.float64] | None:
    """``[B]`` numbers, NaN where missing; None where one cannot be read."""
    if is_string_type(array.type):
        try:
            array = pc.utf8_trim_whitespace(array.cast(pa.string())).cast(pa.float64())
        except pa.ArrowInvalid:
            return None
    elif pa.types.is_temporal(array.type):
        missing = array.is_null().to_numpy(zero_copy_only=False)
        numbers = _integers(array).astype(np.float64)
        numbers[missing] = np.nan
        return numbers
    found = array.cast(pa.float64(), safe=False).fill_null(math.nan)
    plain: npt.NDArray[np.float64] = found.to_numpy(zero_copy_only=False)
    return plain.astype(np.float64)
