"""Arrow columns to the arrays that batches are cut from.

Shapes: ``n`` rows, ``D`` dense columns, ``S`` features of one id, ``N`` ids of a feature with lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tessera.training.data.bags import bag_places
from tessera.training.data.dataset import Rows
from tessera.training.data.string_columns import arrow_string_ids, is_string_type
from tessera.training.data.table.room import Room
from tessera.training.data.table.settle import SparseSource, TableColumns
from tessera.training.data.table.text import TextColumn

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


_BLOCK_ROWS = 2048


class CellError(Exception):
    """A value that its column's kind does not allow; the message is for people."""


@dataclass(frozen=True)
class Jagged:
    """The ids of one feature with lists.

    Attributes:
        values: ``[N]`` ids.
        starts: ``[n]``: where each row's ids begin in ``values``.
        lengths: ``[n]`` int32.
        weights: ``[N]`` of the ids; None: they have none.
    """

    values: Rows
    starts: Rows
    lengths: npt.NDArray[np.int32]
    weights: Floats | None

    def at(self, rows: Any) -> Jagged:
        """The bags of these rows, one after the other in memory."""
        starts, lengths = self.starts[rows], self.lengths[rows]
        ends = np.cumsum(lengths, dtype=np.int64)
        begins = ends - lengths
        if len(starts) and np.array_equal(starts, starts[0] + begins):  # they lie so already
            there = slice(int(starts[0]), int(starts[0] + ends[-1]))
            weights = None if self.weights is None else self.weights[there]
            return Jagged(self.values[there], begins, lengths, weights)
        places = bag_places(starts, lengths)
        # Places are in range; with another mode numpy would look at each again.
        values = np.take(self.values, places, mode="clip")
        weights = None if self.weights is None else np.take(self.weights, places, mode="clip")
        return Jagged(values, begins, lengths, weights)

    @staticmethod
    def joined(parts: list[Jagged], room: Room | None = None) -> Jagged:
        """The rows of all parts, one after the other; their ids in memory of ``room``, if there is one."""
        if len(parts) == 1:
            return parts[0]
        sizes = np.cumsum([0, *(len(part.values) for part in parts)])
        weights = [part.weights for part in parts if part.weights is not None]
        values = None if room is None else room.array(int(sizes[-1]), np.int64)
        return Jagged(
            np.concatenate([part.values for part in parts], out=values),
            np.concatenate([part.starts + size for part, size in zip(parts, sizes, strict=False)]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate(weights) if weights else None,
        )


@dataclass(frozen=True)
class Cut:
    """Some rows, on their way into a batch.

    Attributes:
        rows: ``[n]`` int64, the rows' numbers in the dataset.
        dense: ``[n, D]`` float32, NaN where missing.
        single: for each feature of one id ``[n]`` int64, and ``[n]`` whether there is an id; None:
            there always is.
        lists: the features with lists.
    """

    rows: Rows
    dense: Floats
    single: list[tuple[Rows, Mask | None]]
    lists: list[Jagged]


class Decoded:
    """The features of some rows, written one unit after the other and then cut.

    Rows that are cut in their own order stay columns, as they were decoded.  Rows that are cut in
    another order are stored one after the other: taking a row of 26 ids from one place took a quarter
    of the time of taking 26 ids from 26 places.

    Args:
        columns: what is decoded.
        rows: how many rows there will be.
        units: of how many units.
        room: memory for rows that are cut in another order than their own; None: they are cut in
            it, and there is one unit.
    """

    def __init__(self, columns: TableColumns, rows: int, units: int, *, room: Room | None) -> None:
        self._columns = columns
        self._singles = [source for source in columns.sparse if not source.many]
        self._many = [source for source in columns.sparse if source.many]
        self._room = room
        self._rows = np.empty(rows, np.int64)
        self._dense_columns: list[Floats] = []
        self._single_columns: list[tuple[Rows, Mask | None]] = []
        self._parts: list[list[Jagged]] = [[] for _ in range(units)]
        self._lists: list[Jagged] = []
        if room is not None:
            dense, singles = len(columns.dense), len(self._singles)
            self._lacking = np.zeros((units, singles), np.bool_)
            self._dense = room.array(rows * dense, np.float32).reshape(rows, dense)
            self._ids = room.array(rows * singles, np.int64).reshape(rows, singles)
            self._present = room.array(rows * singles, np.bool_).reshape(rows, singles)

    def write(self, unit: int, at: int, table: Any, chosen: Rows | None, numbers: Rows) -> None:
        """Write the ``chosen`` rows (None: all) of an Arrow table at row ``at``.

        Units may be written by several threads at once.  ``numbers`` are the rows' numbers in the
        dataset.

        Raises:
            CellError: a value cannot be what its column is.
        """
        stop = at + len(numbers)
        self._rows[at:stop] = numbers
        dense = [
            _chosen(read_column(name, table, numbers_of), chosen) for name in self._columns.dense
        ]
        single = []
        for source in self._singles:
            ids, present = read_column(source.column, table, ids_of)
            present = None if present is None else _chosen(present, chosen)
            single.append((_chosen(ids, chosen), present))
        parts = [jagged_of(source, table) for source in self._many]
        self._parts[unit] = parts if chosen is None else [part.at(chosen) for part in parts]
        if self._room is None:
            self._dense_columns, self._single_columns = dense, single
            return
        _interleave(dense, self._dense[at:stop])
        _interleave([ids for ids, _ in single], self._ids[at:stop])
        self._present[at:stop] = True
        for place, (_, present) in enumerate(single):
            if present is not None:
                self._lacking[unit, place] = True
                self._present[at:stop, place] = present

    def close(self) -> None:
        """Join the lists, after all units were written."""
        self._lists = [
            Jagged.joined(list(parts), self._room) for parts in zip(*self._parts, strict=True)
        ]
        self._parts = []

    def cut(self, rows: Rows | slice) -> Cut:
        """The rows at these places, a slice where they are cut in their order."""
        lists = [part.at(rows) for part in self._lists]
        if isinstance(rows, slice):
            dense = np.empty((len(self._rows[rows]), len(self._dense_columns)), np.float32)
            _interleave([column[rows] for column in self._dense_columns], dense)
            single = [
                (ids[rows], None if present is None else present[rows])
                for ids, present in self._single_columns
            ]
            return Cut(self._rows[rows], dense, single, lists)
        # Rows are in range; with another mode numpy would copy the result once more.
        ids = np.ascontiguousarray(np.take(self._ids, rows, axis=0, mode="clip").T)
        lacking = np.flatnonzero(self._lacking.any(axis=0))
        present: dict[int, Mask] = {}
        if len(lacking):
            taken = np.take(self._present, rows, axis=0, mode="clip")
            present = dict(
                zip(lacking.tolist(), np.ascontiguousarray(taken[:, lacking].T), strict=True)
            )
        return Cut(
            np.take(self._rows, rows, mode="clip"),
            np.take(self._dense, rows, axis=0, mode="clip"),
            [(of_feature, present.get(place)) for place, of_feature in enumerate(ids)],
            lists,
        )


def no_rows(columns: TableColumns) -> Cut:
    """A cut without rows, with every feature."""
    none, no_lengths = np.empty(0, np.int64), np.empty(0, np.int32)
    return Cut(
        none,
        np.empty((0, len(columns.dense)), np.float32),
        [(none, None) for source in columns.sparse if not source.many],
        [
            Jagged(none, none, no_lengths, np.empty(0, np.float32) if source.weighted else None)
            for source in columns.sparse
            if source.many
        ],
    )


def _chosen(values: npt.NDArray[Any], rows: Rows | None) -> npt.NDArray[Any]:
    return values if rows is None else values[rows]


def _interleave(columns: list[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    """Write columns ``[n]`` to ``out [n, C]``, in blocks of rows that stay in the cache."""
    for start in range(0, len(out), _BLOCK_ROWS):
        block = out[start : start + _BLOCK_ROWS]
        for place, column in enumerate(columns):
            block[:, place] = column[start : start + _BLOCK_ROWS]


def read_column(name: str, table: Any, read: Callable[[Any], Any]) -> Any:
    """What ``read`` makes of a column of an Arrow table; a `CellError` names the column."""
    try:
        return read(table.column(name))
    except (CellError, pa.ArrowException, OverflowError) as error:
        reason = str(error).splitlines()[0][:200]
        raise CellError(f"column {name!r}: {reason}") from error


def whole_array(column: Any) -> Any:
    """A chunked array as one array, without a dictionary of anything but strings."""
    array = column
    if isinstance(column, pa.ChunkedArray):
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type) and not is_string_type(array.type):
        return array.dictionary_decode()
    return array


def _present(array: Any) -> Mask | None:
    """Which values are not null; None: all."""
    if not array.null_count:
        return None
    present: Mask = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def _values(array: Any) -> npt.NDArray[Any]:
    """The numbers of an array of integers or floats where they lie; anything at nulls."""
    _, content = array.buffers()
    dtype = array.type.to_pandas_dtype()
    if content is None:
        return np.zeros(len(array), dtype)
    values = np.frombuffer(content, dtype)
    return values[array.offset : array.offset + len(array)]


def numbers_of(column: Any) -> Floats:
    """``[n]`` float32, NaN at nulls."""
    array = whole_array(column)
    plain = pa.types.is_integer(array.type) or (
        pa.types.is_floating(array.type) and not pa.types.is_float16(array.type)
    )
    if not plain:
        array = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
        array = array.cast(pa.float32(), safe=False)
    present = _present(array)
    if present is None:
        return _values(array).astype(np.float32, copy=False)
    values = _values(array).astype(np.float32)
    values[~present] = np.nan
    return values


def ids_of(column: Any) -> tuple[Rows, Mask | None]:
    """``[n]`` int64 ids, and ``[n]`` whether there is one; None: there always is."""
    array = whole_array(column)
    kind = array.type
    if pa.types.is_floating(kind):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
        whole = pc.fill_null(pc.equal(array, pc.trunc(array)), fill_value=True)
        if not pc.all(whole).as_py():
            wrong = array.filter(pc.invert(whole))[0].as_py()
            raise CellError(f"{wrong} is not an integer id; give kind dense")
    present = _present(array)
    if is_string_type(kind):
        return arrow_string_ids(array), present
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), np.zeros(len(array), np.bool_)
    if pa.types.is_date32(kind) or pa.types.is_time32(kind) or pa.types.is_boolean(kind):
        array = array.cast(pa.int32())
    if not pa.types.is_int64(array.type):
        array = array.cast(pa.int64(), safe=False)
    return _values(array), present


def jagged_of(source: SparseSource, table: Any) -> Jagged:
    """The ids of a feature with lists, cut to its ``max_length``, of all rows of an Arrow table.

    Raises:
        CellError: a value cannot be an id, or ids and weights do not fit.
    """
    values, lengths, weights = read_column(
        source.column, table, lambda column: _lists(source, column)
    )
    if source.weights is not None:
        of_weights = read_column(source.weights, table, _weight_lists)
        weights, weight_lengths = of_weights
        if not np.array_equal(weight_lengths, lengths):
            row = int(np.flatnonzero(weight_lengths != lengths)[0])
            raise CellError(
                f"column {source.column!r} has a list of {lengths[row]} ids where"
                f" {source.weights!r} has {weight_lengths[row]} weights; give one weight per id"
            )
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    limit = source.max_length
    if limit is not None and len(lengths) and int(lengths.max()) > limit:
        kept = np.minimum(lengths, np.int32(limit))
        starts = starts + (lengths - kept) if source.keep_last else starts
        lengths = kept
    return Jagged(values, starts, lengths, weights)


def _lists(source: SparseSource, column: Any) -> tuple[Rows, npt.NDArray[np.int32], Floats | None]:
    """The ids of all rows, each row's number of them, and their weights if they are in the column."""
    array = whole_array(column)
    if is_string_type(array.type):
        text = array.cast(pa.string())
        whole = TextColumn(
            name=source.column,
            holds="id",
            many=True,
            strings=source.strings,
            separator=source.separator or "|",
        )
        array, bad = whole.read(text)
        if bad is not None and pc.any(bad).as_py():
            cell = text.filter(bad)[0].as_py()
            raise CellError(f"{cell[:60]!r} is not a list of integer ids")
    lengths = _lengths(array)
    weights = None
    if pa.types.is_map(array.type):
        keys, items = _map_items(array)
        ids, present = ids_of(keys)
        weights = np.nan_to_num(numbers_of(items), nan=1.0)
    else:
        ids, present = ids_of(pc.list_flatten(array))
    if present is not None and not present.all():
        if source.weighted:
            raise CellError("a null stands among weighted ids")
        of_row = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(of_row[present], minlength=len(lengths)).astype(np.int32)
        ids = ids[present]
    return ids, lengths, weights


def _map_items(array: Any) -> tuple[Any, Any]:
    """Keys and items of the maps' entries; an array may be a slice of a longer one."""
    first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
    return array.keys.slice(first, last - first), array.items.slice(first, last - first)


def _lengths(array: Any) -> npt.NDArray[np.int32]:
    if pa.types.is_map(array.type):
        ends: npt.NDArray[np.int32] = array.offsets.to_numpy(zero_copy_only=False)
        return np.diff(ends).astype(np.int32)
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    counts: npt.NDArray[np.int32] = lengths.cast(pa.int32()).to_numpy(zero_copy_only=False)
    return counts


def _weight_lists(column: Any) -> tuple[Floats, npt.NDArray[np.int32]]:
    array = whole_array(column)
    values = np.nan_to_num(numbers_of(pc.list_flatten(array)), nan=1.0)
    return values, _lengths(array)
