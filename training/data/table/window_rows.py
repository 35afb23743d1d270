"""The rows of units that were read, and batches of them.

Rows that are cut in their own order stay columns, where Arrow has them, and are copied once, into the batch.
Rows that are cut in another order are stored one after the other first: taking a row of 26 ids from one
place took a quarter of the time of taking 26 ids from 26 places.  The copying is that of the operators
``tessera.table_*``.

Shapes: ``n`` rows, ``D`` dense columns, ``S`` features of one id, ``F`` features, ``N`` ids.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.kernels import ops
from tessera.training.data.dataset import Rows
from tessera.training.data.table.decode import (
    Column,
    Floats,
    Jagged,
    dense_column,
    id_column,
    jagged_of,
    lists_of,
)
from tessera.training.data.table.room import Room
from tessera.training.data.table.settle import TableColumns


@dataclass(frozen=True)
class Cut:
    """Some rows, on their way into a batch.

    Attributes:
        rows: ``[n]`` int64, the rows' numbers in the dataset.
        dense: ``[n, D]`` float32, NaN where missing.
        lengths: ``[F * n]`` int32, feature after feature: how many ids each row has.
        values: ``[N]`` int64 ids, feature after feature.
        weights: ``[N]`` of the ids, 1 where a feature has none; None if none has any.
    """

    rows: Rows
    dense: Floats
    lengths: npt.NDArray[np.int32]
    values: Rows
    weights: Floats | None


def no_rows(columns: TableColumns) -> Cut:
    """A cut without rows."""
    none, weighted = np.empty(0, np.int64), any(source.weighted for source in columns.sparse)
    return Cut(
        none,
        np.empty((0, len(columns.dense)), np.float32),
        np.empty(0, np.int32),
        none,
        np.empty(0, np.float32) if weighted else None,
    )


def joined(cuts: Sequence[Cut]) -> Cut:
    """The rows of all cuts, at least one, one cut after the other."""
    cuts = [cut for cut in cuts if len(cut.rows)] or cuts[:1]
    if len(cuts) == 1:
        return cuts[0]
    lengths = [cut.lengths.reshape(-1, len(cut.rows)) for cut in cuts]
    bounds = [np.cumsum([0, *own.sum(axis=1)]) for own in lengths]

    def by_feature(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        parts = [
            array[ends[feature] : ends[feature + 1]]
            for feature in range(len(lengths[0]))
            for array, ends in zip(arrays, bounds, strict=True)
        ]
        return np.concatenate(parts) if parts else arrays[0]

    weights = [cut.weights for cut in cuts if cut.weights is not None]
    return Cut(
        np.concatenate([cut.rows for cut in cuts]),
        np.concatenate([cut.dense for cut in cuts]),
        np.concatenate(lengths, axis=1).reshape(-1),
        by_feature([cut.values for cut in cuts]),
        by_feature(weights) if weights else None,
    )


Lists = tuple[list[torch.Tensor], ...]
Columns = tuple[list[torch.Tensor], ...]
"""Values and bits of the dense columns, and of those of one id."""


class Decoded:
    """The features of some rows, written one unit after the other and then cut.

    Args:
        columns: what is decoded.
        rows: how many rows there will be.
        units: of how many units.
        room: memory for rows that are cut in another order than their own; None: they are cut in
            it, and there is one unit.
    """

    def __init__(self, columns: TableColumns, rows: int, units: int, *, room: Room | None) -> None:
        ops.load()
        self._columns = columns
        self._singles = [source for source in columns.sparse if not source.many]
        self._many = [source for source in columns.sparse if source.many]
        self._weighted = any(source.weighted for source in self._many)
        self._room = room
        self._rows = np.empty(rows, np.int64)
        # Either parts of a unit as Arrow has them, with the row that each ends before,
        self._whole: list[tuple[Columns, Lists]] = []
        self._ends: list[int] = []
        # or all rows one after the other, and their lists.
        self._stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._parts: list[list[list[Jagged]]] = [[] for _ in range(units)]
        self._lists: Lists = ([], [], [], [])
        if room is not None:
            self._stored = self._places()

    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Memory for rows: dense values, ids, and bits that say which features have an id."""
        rows, dense, singles = len(self._rows), len(self._columns.dense), len(self._singles)
        words = -(-singles // 64)
        make = np.empty if self._room is None else self._room.array
        return (
            torch.from_numpy(make(rows * dense, np.float32)).view(rows, dense),
            torch.from_numpy(make(rows * singles, np.int64)).view(rows, singles),
            torch.from_numpy(make(rows * words, np.int64)).view(rows, words),
        )

    def write(self, unit: int, at: int, table: Any, chosen: Rows | None, numbers: Rows) -> None:
        """Write the ``chosen`` rows (None: all) of an Arrow table at row ``at``.

        Units may be written by several threads at once.  ``numbers`` are the rows' numbers in the
        dataset.

        Raises:
            CellError: a value cannot be what its column is.
        """
        self._rows[at : at + len(numbers)] = numbers
        if self._room is None and chosen is not None:
            self._stored = self._places()
        first = 0
        for end in _ends_of_chunks(table):
            part = table.slice(first, end - first)
            own = None
            if chosen is not None:
                begin, stop = np.searchsorted(chosen, (first, end)).tolist()
                own = chosen[begin:stop] - first
            rows = part.num_rows if own is None else len(own)
            if rows:
                self._write_part(unit, slice(at, at + rows), part, own)
            at += rows
            first = end

    def _write_part(self, unit: int, place: slice, part: Any, chosen: Rows | None) -> None:
        dense = [dense_column(name, part) for name in self._columns.dense]
        ids = [id_column(source.column, part) for source in self._singles]
        lists = [jagged_of(source, part) for source in self._many]
        if self._stored is None:
            self._whole.append(((*_of_columns(dense), *_of_columns(ids)), lists_of(lists)))
            self._ends.append(place.stop)
            return
        torch.ops.tessera.table_interleave(
            *_of_columns(dense),
            *_of_columns(ids),
            None if chosen is None else torch.from_numpy(chosen),
            *(rows[place] for rows in self._stored),
        )
        self._parts[unit].append(lists if chosen is None else [own.at(chosen) for own in lists])

    def close(self) -> None:
        """Join the lists, after all units were written."""
        parts = [lists for unit in self._parts for lists in unit]
        of_features = zip(*parts, strict=True)
        if self._many and parts:
            self._lists = lists_of([Jagged.joined(list(own), self._room) for own in of_features])
        self._parts = []

    def cut(self, rows: Rows | slice) -> Cut:
        """The rows at these places, a slice where they are cut in their order."""
        if self._stored is None and isinstance(rows, slice):
            cuts = self._cuts_of_parts(rows.start, rows.stop)
            return joined(cuts or [no_rows(self._columns)])
        assert self._stored is not None, "rows in another order than their own are stored"
        places = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        found = torch.ops.tessera.table_batch_at(
            *self._stored, *self._lists, torch.from_numpy(places), self._weighted
        )
        return self._cut(rows, found)

    def _cuts_of_parts(self, start: int, stop: int) -> list[Cut]:
        cuts = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            before = self._ends[number - 1] if number else 0
            end = min(stop, self._ends[number])
            columns, lists = self._whole[number]
            found = torch.ops.tessera.table_batch(
                *columns,
                *lists,
                start - before,
                end - start,
                self._weighted,
            )
            cuts.append(self._cut(slice(start, end), found))
            start, number = end, number + 1
        return cuts

    def _cut(self, rows: Rows | slice, found: Sequence[torch.Tensor]) -> Cut:
        dense, lengths, values, weights = (part.numpy() for part in found)
        return Cut(self._rows[rows], dense, lengths, values, weights if self._weighted else None)


def _ends_of_chunks(table: Any) -> list[int]:
    """Where the parts of a table end that were read at once.

    Columns of strings may have more chunks than there are parts, one for each dictionary.
    """
    fewest = min(table.columns, key=lambda column: int(column.num_chunks))
    ends: list[int] = np.cumsum([len(chunk) for chunk in fewest.chunks]).tolist()
    return ends


def _of_columns(columns: Sequence[Column]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [column.values for column in columns], [column.present for column in columns]
