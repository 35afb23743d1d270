"""Arrow columns to the arrays that batches are cut from.

Shapes: ``n`` rows, ``N`` ids of a feature with lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tessera.kernels import ops
from tessera.training.data.dataset import Rows
from tessera.training.data.read_only import read_only_tensor
from tessera.training.data.string_columns import (
    arrow_string_ids,
    is_string_type,
)
from tessera.training.data.table.room import Room
from tessera.training.data.table.settle import SparseSource
from tessera.training.data.table.text import TextColumn

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


_NO_BITS = np.empty(0, np.uint8)


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

    def at(self, rows: Rows) -> Jagged:
        """The bags of these rows, one after the other in memory."""
        ops.load()
        no_columns = torch.empty((len(self.starts), 0))
        _, lengths, values, weights = torch.ops.tessera.table_batch_at(
            no_columns,
            no_columns.long(),
            no_columns.long(),
            *lists_of([self]),
            torch.from_numpy(rows),
            self.weights is not None,
        )
        lengths = lengths.numpy()
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        kept = None if self.weights is None else weights.numpy()
        return Jagged(values.numpy(), starts, lengths, kept)

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
class Column:
    """One number of every row, where Arrow has it.

    Attributes:
        values: ``[n]`` float32 or int64; anything where there is none.
        present: uint8 bits, the first row in the lowest bit of the first byte: whether there is one;
            empty: there always is.
    """

    values: torch.Tensor
    present: torch.Tensor


def dense_column(name: str, table: Any) -> Column:
    """The numbers of a column of an Arrow table.

    Raises:
        CellError: the column cannot be read as numbers.
    """
    return _column(*read_column(name, table, _numbers))


def id_column(name: str, table: Any) -> Column:
    """The ids of a column of an Arrow table.

    Raises:
        CellError: a value cannot be an id.
    """
    return _column(*read_column(name, table, _ids))


def _column(values: npt.NDArray[Any], array: Any) -> Column:
    return Column(read_only_tensor(values), read_only_tensor(_bits(array)))


def lists_of(features: Sequence[Jagged]) -> tuple[list[torch.Tensor], ...]:
    """Values, weights (empty: none), starts and lengths of features, as the operators take them."""
    none = torch.empty(0)
    return (
        [read_only_tensor(own.values) for own in features],
        [none if own.weights is None else read_only_tensor(own.weights) for own in features],
        [torch.from_numpy(own.starts) for own in features],
        [read_only_tensor(own.lengths) for own in features],
    )


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


def _bits(array: Any) -> npt.NDArray[np.uint8]:
    """Which values are not null, as `Column.present` has it."""
    present = _NO_BITS
    if array.null_count:
        bitmap = None if pa.types.is_dictionary(array.type) else array.buffers()[0]
        if bitmap is None or array.offset % 8:
            present = np.packbits(array.is_valid().to_numpy(False), bitorder="little")
        else:
            present = np.frombuffer(bitmap, np.uint8)[array.offset // 8 :]
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
    values, array = _numbers(column)
    present = _present(array)
    if present is None:
        return values
    filled: Floats = np.where(present, values, np.float32(np.nan))
    return filled


def _numbers(column: Any) -> tuple[Floats, Any]:
    """``[n]`` float32, anything at nulls, and an array that says where these are."""
    array = whole_array(column)
    plain = pa.types.is_integer(array.type) or (
        pa.types.is_floating(array.type) and not pa.types.is_float16(array.type)
    )
    if not plain:
        array = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
        array = array.cast(pa.float32(), safe=False)
    return _values(array).astype(np.float32, copy=False), array


def ids_of(column: Any) -> tuple[Rows, Mask | None]:
    """``[n]`` int64 ids, and ``[n]`` whether there is one; None: there always is."""
    ids, array = _ids(column)
    return ids, _present(array)


def _ids(column: Any) -> tuple[Rows, Any]:
    """``[n]`` int64 ids, anything at nulls, and an array that says where these are."""
    array = whole_array(column)
    kind = array.type
    if pa.types.is_floating(kind):
        array = pc.if_else(pc.is_nan(array), pa.scalar(None, kind), array)
        whole = pc.fill_null(pc.equal(array, pc.trunc(array)), fill_value=True)
        if not pc.all(whole).as_py():
            wrong = array.filter(pc.invert(whole))[0].as_py()
            raise CellError(f"{wrong} is not an integer id; give kind dense")
    if is_string_type(kind):
        return arrow_string_ids(array), array
    if pa.types.is_null(kind):
        return np.zeros(len(array), np.int64), array
    if pa.types.is_date32(kind) or pa.types.is_time32(kind) or pa.types.is_boolean(kind):
        array = array.cast(pa.int32())
    if not pa.types.is_int64(array.type):
        array = array.cast(pa.int64(), safe=False)
    return _values(array), array


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
