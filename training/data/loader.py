"""`BatchLoader`: a view's rows as batches, in an order that can be taken up anywhere.

The order of an epoch is a function of (seed, epoch) alone, and batch ``k`` of it is a function of
that order, so a run that was stopped after ``k`` batches goes on with exactly those that it has
not seen.

Shuffling is by windows, so that memory does not grow with the data.  A table has windows of units
(see `tessera.training.data.table.view`).  A `DatasetView` is cut into blocks of `BLOCK_ROWS`
neighbouring rows (see `tessera.training.data.dataset`); the blocks are drawn in random order,
`WINDOW_BLOCKS` at a time, and the rows of such a window are shuffled together.  A view of up to one
window is therefore shuffled perfectly; in a larger one every window still mixes rows from all over
the data, while the disk is read in runs of `BLOCK_ROWS` rows.  Held in memory: the row numbers of the
window that is read and of the next one (8 MiB each), and ``prefetch + 2`` batches; of a view that packs, three
times `PACKED_ROWS` rows, or as many batches.

Several ranks that train together make the parts of one batch each (`BatchLoader`'s ``part``).  The batch,
as a set of rows, is that of one rank, whatever their number.

One thread draws the order and hands the row numbers of each batch to ``threads`` that gather them;
the batches come out in the order, whoever is done first.  A window is shuffled by a thread of its own while
the one before it is read.  Where the view packs, a thread gathers several batches in one call: what is left for
the interpreter, whose lock a training step takes some hundred times, is the same for eight batches as for one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from tessera.training.data.batch import Batch
from tessera.training.data.dataset import (
    DatasetView,
    EpochOrder,
    PacksRows,
    Part,
    Rows,
    View,
    cut_evenly,
)


class BatchLoader:
    """Batches of ``view``, epoch by epoch.

    Args:
        view: the rows.  Where it packs, shuffled batches are `PackedBatch`es.
        batch_size: samples in a batch; the last one of an epoch may be smaller.
        shuffle: whether an epoch's order is random (see the module) or the view's own.
        seed: of the random order.
        drop_last: leave out a last batch that is smaller than ``batch_size``.
        prefetch: batches that are made ahead of the consumer; 0: none, and no thread makes them.
        threads: how many make them.
        finish: what is done to each batch by the thread that made it, e.g. pinning its memory.
        numbered: whether batches hold the ``row_numbers`` of the dataset, and otherwise none.
        part: (r, n): of every batch only the r-th of n parts.  Shuffled, the parts of all ranks are
            together the batch that one rank would make; see `EpochOrder.place` for who gets which
            rows.  In the view's own order, each rank has n-ths of the batches' sizes, but the rows
            are those of its own share of the view, from beginning to end.  A part may be empty.

    Raises:
        ValueError: ``batch_size`` or ``threads`` below 1, ``prefetch`` or ``seed`` below 0, or no
            such part.
    """

    def __init__(
        self,
        view: View,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        prefetch: int = 2,
        threads: int = 1,
        finish: Callable[[Batch], Batch] | None = None,
        numbered: bool = False,
        part: Part = (0, 1),
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("prefetch", prefetch, 0),
            ("threads", threads, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give at least {least}")
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"part={part}: give (r, n) with r from 0 to n - 1")
        self._view = view
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._prefetch = prefetch
        self._threads = threads
        self._finish = finish
        self._numbered = numbered
        self._part = part
        full, rest = divmod(len(view), batch_size)
        self._num_batches = full if drop_last or rest == 0 else full + 1

    @property
    def num_batches(self) -> int:
        """Batches in every epoch."""
        return self._num_batches

    def batch_rows(self, number: int) -> int:
        """Samples of batch ``number`` of an epoch, all parts together."""
        start = number * self._batch_size
        return min(start + self._batch_size, len(self._view)) - start

    def epoch(
        self, epoch: int, start_batch: int = 0, stop_batch: int | None = None
    ) -> Iterator[Batch]:
        """The batches of ``epoch`` from number ``start_batch`` on, to ``stop_batch - 1`` if given.

        Closing the iterator (or dropping it) stops the threads behind it.  An error while a
        batch is made is raised here, in its place, or in that of the first of those that are packed together.

        Raises:
            ValueError: ``epoch`` is negative, or ``start_batch`` outside [0, num_batches].
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: epochs are counted from 0")
        if not 0 <= start_batch <= self._num_batches:
            raise ValueError(
                f"start_batch={start_batch}: an epoch has batches 0 to {self._num_batches}"
            )
        return self._batches(epoch, start_batch, stop_batch)

    def _batches(self, epoch: int, start: int, stop: int | None) -> Iterator[Batch]:
        seed = self._seed if self._shuffle else None
        with contextlib.closing(self._view.order(epoch, seed=seed, threads=self._threads)) as order:
            places = self._places(order, start, stop)

            if isinstance(self._view, DatasetView) and self._view.packs and self._shuffle:
                yield from self._packed(self._view, places)
                return

            def gather(place: Any) -> Batch:
                batch = order.gather(place)
                batch.row_numbers = batch.row_numbers if self._numbered else None
                return batch if self._finish is None else self._finish(batch)

            if self._prefetch:
                yield from made_ahead(gather, places, depth=self._prefetch, threads=self._threads)
            else:
                yield from map(gather, places)

    def _packed(self, view: DatasetView, places: Iterator[Rows]) -> Iterator[Any]:
        """`PackedBatch`es; they have no numbers, and lie where the device copies from."""
        dataset = view.dataset
        assert isinstance(dataset, PacksRows)
        if not self._prefetch:
            for place in places:
                yield from dataset.packed([place])
            return
        own = max(1, self._batch_size // self._part[1])
        groups = _growing(places, most=max(1, min(self._prefetch, PACKED_ROWS // own)))
        made = made_ahead(dataset.packed, groups, depth=_GROUPS_AHEAD, threads=self._threads)
        with contextlib.closing(made):
            for group in made:
                yield from group

    def _places(self, order: EpochOrder, start_batch: int, stop_batch: int | None) -> Iterator[Any]:
        """Where each batch's rows are."""
        for number in range(start_batch, self._num_batches if stop_batch is None else stop_batch):
            if self._shuffle:
                first = number * self._batch_size
                yield order.place(first, first + self.batch_rows(number), self._part)
            else:
                yield order.place(*self._of_share(number))

    def _of_share(self, number: int) -> tuple[int, int]:
        """The places of this part of batch ``number`` in the view's own order."""
        last = self._num_batches - 1
        own_start, own_stop = cut_evenly(0, self._batch_size, self._part)
        # The parts before this one have as much of all full batches, and of the last one.
        share = last * own_start
        if last >= 0:
            share += cut_evenly(0, self.batch_rows(last), self._part)[0]
        begin, end = cut_evenly(0, self.batch_rows(number), self._part)
        first = share + number * (own_stop - own_start)
        return first, first + end - begin


PACKED_ROWS = 1 << 18
"""So many rows, or one batch, are packed at once at most."""
_GROUPS_AHEAD = 2

X = TypeVar("X")
Y = TypeVar("Y")


def _growing(items: Iterator[X], *, most: int) -> Iterator[list[X]]:
    """The items in groups of 1, 2, 4 and so on up to ``most``, so that the first is not waited for longer."""
    size = 1
    while group := list(itertools.islice(items, size)):
        yield group
        size = min(2 * size, most)


def made_ahead(
    make: Callable[[X], Y], items: Iterator[X], *, depth: int, threads: int
) -> Generator[Y, None, None]:
    """``map(make, items)`` in order, up to ``depth`` results made ahead by ``threads``.

    The items are drawn by one thread of their own, which ends with this iterator, as the others do.
    """
    drawing = ThreadPoolExecutor(1, "tessera-order")
    making = ThreadPoolExecutor(threads, "tessera-prefetch")

    def begin() -> Future[Y] | None:
        item = next(items, None)
        return None if item is None else making.submit(make, item)

    try:
        ahead = deque(drawing.submit(begin) for _ in range(depth))
        while (made := ahead.popleft().result()) is not None:
            ahead.append(drawing.submit(begin))
            yield made.result()
    finally:
        drawing.shutdown(cancel_futures=True)
        making.shutdown(cancel_futures=True)
