"""`StreamLoader`: the rows of a growing folder as batches, in the order of their arrival."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tessera.training.data.batch import Batch
from tessera.training.data.dataset import Part, cut_evenly
from tessera.training.data.loader import made_ahead
from tessera.training.data.table.follow import FolderStream, Segment
from tessera.training.data.table.view import TableOrder, batch_of

ENDLESS = 1 << 62
"""Batches of an epoch that nobody knows the end of."""


@dataclass(frozen=True)
class _Piece:
    segment: Segment
    order: TableOrder
    place: Any


class StreamLoader:
    """The batches of a growing folder; what `BatchLoader` is to other views.

    An epoch waits for files and ends with the stream, or with its last step; only its last batch may be
    smaller.  It also ends, before the batch that is not whole, when the run is asked to stop.

    Args:
        stream: the folder, begun.
        batch_size: samples in a batch, of all parts.
        first_row: the first row of batch 0; those before it were trained on by other runs.
        prefetch, threads, finish, numbered, part: as of `BatchLoader`; each part is a stretch of the
            batch's rows.
    """

    def __init__(
        self,
        stream: FolderStream,
        *,
        batch_size: int,
        prefetch: int,
        threads: int,
        finish: Callable[[Batch], Batch] | None,
        numbered: bool,
        part: Part,
        first_row: int = 0,
    ) -> None:
        self._stream, self._batch_size, self._first_row = stream, batch_size, first_row
        self._prefetch, self._threads = max(1, prefetch), threads
        self._finish, self._numbered, self._part = finish, numbered, part
        self._ended_at: int | None = None

    @property
    def num_batches(self) -> int:
        """More than there will be: when the stream ends is known when it has."""
        return self._stream.follow.max_steps or ENDLESS

    @property
    def ended(self) -> bool:
        """Whether the batches that `epoch` gave last were the last ones of the stream."""
        return self._ended_at is not None

    def batch_rows(self, number: int) -> int:
        """Samples of batch ``number``, which was made, all parts together."""
        size, first = self._batch_size, self._first_row + number * self._batch_size
        return size if self._ended_at is None else min(size, self._ended_at - first)

    def epoch(
        self, epoch: int, start_batch: int = 0, stop_batch: int | None = None
    ) -> Iterator[Batch]:
        """See `BatchLoader.epoch`; a stream has one epoch, whatever its number."""
        del epoch
        closed = threading.Event()
        stop = self.num_batches if stop_batch is None else stop_batch
        batches = made_ahead(
            self._gather,
            self._places(start_batch, min(stop, self.num_batches), closed),
            depth=self._prefetch,
            threads=self._threads,
        )
        try:
            yield from batches
        finally:
            closed.set()
            batches.close()

    def _places(self, start: int, stop: int, closed: threading.Event) -> Iterator[list[_Piece]]:
        orders: dict[int, TableOrder] = {}
        try:
            for number in range(start, stop):
                first = self._first_row + number * self._batch_size
                arrived, whole = self._stream.rows_until(first + self._batch_size, closed)
                if whole and arrived <= first + self._batch_size:
                    self._ended_at = arrived
                last = min(first + self._batch_size, arrived)
                if last <= first or (last < first + self._batch_size and not whole):
                    return
                yield self._pieces(*cut_evenly(first, last, self._part), orders)
        finally:
            for order in orders.values():
                order.let_go()

    def _pieces(self, begin: int, end: int, orders: dict[int, TableOrder]) -> list[_Piece]:
        pieces = []
        while begin < end:
            segment = self._stream.segment_at(begin)
            for passed in [key for key in orders if key < segment.first]:
                orders.pop(passed).let_go()
                self._stream.forget_before(segment)
            if segment.first not in orders:
                view = self._stream.view_of(segment)
                orders[segment.first] = view.order(0, seed=None, threads=self._threads)
            stop = min(end, segment.first + segment.rows)
            order = orders[segment.first]
            place = order.place(begin - segment.first, stop - segment.first)
            pieces.append(_Piece(segment, order, place))
            begin = stop
        return pieces

    def _gather(self, pieces: list[_Piece]) -> Batch:
        parts = [
            (piece.order.dataset, piece.segment.first_number, cut)
            for piece in pieces
            for cut in piece.order.cuts(piece.place)
        ]
        batch = batch_of(self._stream.table_columns, parts)
        batch.row_numbers = batch.row_numbers if self._numbered else None
        return batch if self._finish is None else self._finish(batch)
