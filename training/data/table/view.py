"""A table's units to batches, in order or shuffled.

An epoch goes through windows.  In order, a window is one unit.  Shuffled, the units are drawn in random
order, and as many as make `WINDOW_ROWS` rows (or `WINDOW_BYTES`) are a window, whose rows are shuffled
together.  Windows are decoded by threads, the next ones while batches are cut from one.

Of several ranks each decodes its own share of every shuffled window, the rows between two places of the
window before it is shuffled, and of every batch takes the rows that are among them: the batch is that
of one rank, and nobody decodes what others need, but for a row group that a share begins or ends in.

What batch ``k`` of an epoch holds is a function of (seed, epoch) alone, and beginning there reads only
the windows from there on.  Held in memory: the windows under way, two of a shuffled epoch.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.errors import UserError
from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.dataset import Part, Rows, cut_evenly
from tessera.training.data.table.decode import CellError
from tessera.training.data.table.index import RowIndex
from tessera.training.data.table.parquet import TableFile, Unit
from tessera.training.data.table.room import Room
from tessera.training.data.table.settle import TableColumns
from tessera.training.data.table.window_rows import Cut, Decoded, joined, no_rows

WINDOW_ROWS = 1 << 19
WINDOW_BYTES = 256 << 20


class TableDataset:
    """The rows of Parquet files; see `Described`.

    Args:
        files: the files.
        units: how they are cut.
        columns: what their columns are used for.
        index: what is known of their rows.
    """

    def __init__(
        self,
        files: Sequence[TableFile],
        units: Sequence[Unit],
        columns: TableColumns,
        index: RowIndex,
    ) -> None:
        self.files, self.units, self.table_columns, self.index = files, units, columns, index
        self.columns = columns.columns

    def __len__(self) -> int:
        return len(self.index.split)


class TableView:
    """The rows of one split of a table; see `View`.

    Args:
        dataset: the table.
        split: the number of the split in its index.
    """

    def __init__(self, dataset: TableDataset, split: int) -> None:
        self.dataset = dataset
        self._split = split
        self.rooms: list[Room] = []  # of windows that are done, for those that follow
        self._decoders: dict[tuple[int, int], ThreadPoolExecutor] = {}
        parts = (self._of_unit(unit) for unit in dataset.units)
        self.unit_rows = np.array([np.count_nonzero(part) for part in parts], np.int64)

    def of_dense(self) -> TableView:
        """The same rows without their sparse features, whose columns are then not read."""
        own = self.dataset
        columns = dataclasses.replace(
            own.table_columns.columns,
            sparse=(),
            crosses={},
            target_statistics={},
            user_id=None,
            item_id=None,
        )
        narrow = dataclasses.replace(own.table_columns, sparse=(), columns=columns)
        return TableView(TableDataset(own.files, own.units, narrow, own.index), self._split)

    def _of_unit(self, unit: Unit) -> npt.NDArray[np.bool_]:
        split = self.dataset.index.split[unit.first_row : unit.first_row + unit.rows]
        own: npt.NDArray[np.bool_] = split == self._split
        return own

    def __len__(self) -> int:
        return int(self.unit_rows.sum())

    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """See `View.labels`."""
        labels = self.dataset.index.labels
        left = len(self) if limit is None else min(limit, len(self))
        parts = [labels[:0]]
        for unit, rows in zip(self.dataset.units, self.unit_rows.tolist(), strict=True):
            if left <= 0:
                break
            if rows:
                own = labels[unit.first_row : unit.first_row + unit.rows][self._of_unit(unit)]
                parts.append(own[:left])
                left -= rows
        found = np.concatenate(parts)
        return found[:, 0] if found.shape[1] == 1 else found

    def order(self, epoch: int, *, seed: int | None, threads: int) -> TableOrder:
        """See `View.order`."""
        return TableOrder(self, epoch, seed=seed, threads=threads)

    def decoders(self, threads: int) -> ThreadPoolExecutor:
        """The threads that decode units, the same ones for every epoch.

        Arrow's allocator keeps memory for each thread: what a new thread decodes lies in pages that are
        new to the process, and clearing those took a tenth of the time of an epoch of a million rows.
        """
        key = (threads, os.getpid())  # a fork takes no threads along
        if key not in self._decoders:
            self._decoders = {key: ThreadPoolExecutor(threads, "tessera-decode")}
        return self._decoders[key]

    def windows(self, order: Sequence[int], *, whole: bool) -> list[list[int]]:
        """The units of ``order`` that have rows of this view, grouped to windows.

        With ``whole`` each is a window of its own.
        """
        windows: list[list[int]] = []
        rows = held = 0
        for number in order:
            unit, own = self.dataset.units[number], int(self.unit_rows[number])
            if not own:
                continue
            size = unit.decoded_bytes * own // unit.rows
            if whole or not windows or rows + own > WINDOW_ROWS or held + size > WINDOW_BYTES:
                windows.append([])
                rows = held = 0
            windows[-1].append(number)
            rows += own
            held += size
        return windows

    def read(self, piece: UnitPiece, window: Decoded, place: int) -> None:
        """Decode some rows of a unit into a window, as its unit ``place``.

        Raises:
            UserError: a file is damaged or holds a value that its column's kind does not allow.
        """
        data = self.dataset
        unit = data.units[piece.unit]
        file = data.files[unit.file]
        own = np.flatnonzero(self._of_unit(unit))[piece.start : piece.stop]
        groups, before, rows = file.groups_of(unit.groups, int(own[0]), int(own[-1]) + 1)
        table = file.read(groups, data.table_columns.feature_names())
        chosen = None if len(own) == rows else own - before
        try:
            window.write(place, piece.at, table, chosen, own + unit.first_row)
        except CellError as error:
            raise UserError(f"{file.source}: {error}") from error


@dataclass(frozen=True)
class UnitPiece:
    """Neighbouring rows of a view in one unit, and where they go in a window.

    Attributes:
        unit: the unit's number.
        start, stop: the rows, counted among those of the view in the unit.
        at: the place of the first in what is decoded.
    """

    unit: int
    start: int
    stop: int
    at: int


def _pieces(view: TableView, units: Sequence[int], first: int, end: int) -> list[UnitPiece]:
    """The rows at places ``first`` to ``end - 1`` of these units' rows."""
    pieces = []
    begin = 0
    for number in units:
        rows = int(view.unit_rows[number])
        start, stop = max(first - begin, 0), min(end - begin, rows)
        if start < stop:
            pieces.append(UnitPiece(number, start, stop, begin + start - first))
        begin += rows
    return pieces


class _Window:
    """Units that are decoded together, and the order of their rows.

    Of a shuffled one, only ``part`` is decoded.
    """

    def __init__(
        self,
        view: TableView,
        units: Sequence[int],
        pool: ThreadPoolExecutor,
        seed: tuple[int, int, int] | None,
        part: Part,
    ) -> None:
        total = sum(int(view.unit_rows[number]) for number in units)
        first, end = (0, total) if seed is None else cut_evenly(0, total, part)
        pieces = _pieces(view, units, first, end)
        room = None
        if seed is not None:
            room = view.rooms.pop() if view.rooms else Room()
            room.begin()
        self._decoded = Decoded(view.dataset.table_columns, end - first, len(pieces), room=room)
        if room is not None:  # the next window's, once nobody reads or writes this one's rows
            weakref.finalize(self._decoded, view.rooms.append, room)
        self.reads: list[Future[None]] = [
            pool.submit(view.read, piece, self._decoded, place)
            for place, piece in enumerate(pieces)
        ]
        self._order = None if seed is None else np.random.default_rng(seed).permutation(total)
        self._first, self._end, self._whole = first, end, end - first == total
        self._lock = threading.Lock()
        self._closed = False

    def decoded(self) -> Decoded:
        """The rows, once all units are read."""
        with self._lock:
            if not self._closed:
                for read in self.reads:
                    read.result()
                self._decoded.close()
                self._closed = True
        return self._decoded

    def rows(self, start: int, stop: int) -> Rows | slice:
        """The rows at these places of the window's order that are decoded here."""
        if self._order is None:
            return slice(start, stop)
        rows = self._order[start:stop]
        if self._whole:
            return rows
        own: Rows = rows[(rows >= self._first) & (rows < self._end)] - self._first
        return own


@dataclass(frozen=True)
class _Piece:
    window: _Window
    start: int
    stop: int


class TableOrder:
    """One epoch; see `EpochOrder`."""

    def __init__(self, view: TableView, epoch: int, *, seed: int | None, threads: int) -> None:
        self._view = view
        self._key = None if seed is None else (seed, epoch)
        numbers = range(len(view.dataset.units))
        order: Sequence[int] = numbers
        if self._key is not None:
            order = np.random.default_rng(self._key).permutation(len(numbers)).tolist()
        self._units = view.windows(order, whole=self._key is None)
        sizes = [sum(int(view.unit_rows[n]) for n in window) for window in self._units]
        self._bounds = np.cumsum([0, *sizes])
        self._ahead = 1 if self._key is not None else threads
        self._pool = view.decoders(threads)
        self._open: dict[int, _Window] = {}

    def place(self, start: int, stop: int, part: Part = (0, 1)) -> list[_Piece]:
        """See `EpochOrder.place`."""
        if self._key is None:
            start, stop = cut_evenly(start, stop, part)
        pieces = []
        number = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            first, end = int(self._bounds[number]), int(self._bounds[number + 1])
            window = self._window(number, part)
            pieces.append(_Piece(window, start - first, min(stop, end) - first))
            start = min(stop, end)
            number += 1
        return pieces

    def _window(self, number: int, part: Part) -> _Window:
        for old in [key for key in self._open if key < number]:
            del self._open[old]
        for key in range(number, min(number + self._ahead + 1, len(self._units))):
            if key not in self._open:
                # key + 1: a trailing 0 would be the generator that drew the units
                seed = None if self._key is None else (*self._key, key + 1)
                self._open[key] = _Window(self._view, self._units[key], self._pool, seed, part)
        return self._open[number]

    def gather(self, pieces: list[_Piece]) -> Batch:
        """See `EpochOrder.gather`."""
        dataset = self._view.dataset
        return batch_of(dataset.table_columns, [(dataset, 0, cut) for cut in self.cuts(pieces)])

    @property
    def dataset(self) -> TableDataset:
        """Whose rows are in order."""
        return self._view.dataset

    def cuts(self, pieces: list[_Piece]) -> list[Cut]:
        """The rows at a place, on their way into a batch."""
        return [p.window.decoded().cut(p.window.rows(p.start, p.stop)) for p in pieces]

    def let_go(self) -> None:
        """No further places are asked for; what was asked for can still be gathered."""
        self._open.clear()

    def close(self) -> None:
        """Read no further; returns after what is being read just now."""
        wait_until_left(window.reads for window in self._open.values())
        self._open.clear()


def wait_until_left(reads: Iterable[Sequence[Future[None]]]) -> None:
    """Cancel what has not begun, and wait for what has."""
    wait([read for of_window in reads for read in of_window if not read.cancel()])


def batch_of(columns: TableColumns, parts: list[tuple[TableDataset, int, Cut]]) -> Batch:
    """A batch of cuts of tables, each with the number that the first row of its table has."""
    cut = joined([cut for _, _, cut in parts] or [no_rows(columns)])
    rows = _joined([own.rows + first for _, first, own in parts] or [cut.rows])
    none = np.empty((0, len(columns.labels)), np.float32)
    labels = _joined([at_rows(table.index.labels, own.rows) for table, _, own in parts] or [none])
    weights = [
        at_rows(table.index.weights, own.rows)
        for table, _, own in parts
        if table.index.weights is not None
    ]
    if columns.weight is not None and not parts:
        weights = [np.empty(0, np.float32)]
    return make_batch(
        dense=cut.dense,
        keys=columns.columns.sparse_names,
        lengths=cut.lengths,
        values=cut.values,
        labels=labels[:, 0] if labels.shape[1] == 1 else labels,
        value_weights=cut.weights,
        weights=_joined(weights) if weights else None,
        row_numbers=rows,
    )


def at_rows(array: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
    """A copy of these rows of an array, at once where they are neighbours in their order."""
    found: npt.NDArray[Any]
    if (
        len(rows)
        and int(rows[-1]) - int(rows[0]) + 1 == len(rows)
        and bool((rows[1:] > rows[:-1]).all())
    ):
        found = array[rows[0] : rows[-1] + 1].copy()
    else:
        found = np.take(array, rows, axis=0)
    return found


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
