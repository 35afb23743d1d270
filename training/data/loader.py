"""`BatchLoader`: a view's rows as batches, in an order that can be taken up anywhere.

The order of an epoch is a function of (seed, epoch) alone, and batch ``k`` of it is a function of
that order, so a run that was stopped after ``k`` batches goes on with exactly those that it has
not seen.

Shuffling is by windows, so that memory does not grow with the data.  The view is cut into blocks
of `BLOCK_ROWS` neighbouring rows; the blocks are drawn in random order, `WINDOW_BLOCKS` at a time,
and the rows of such a window are shuffled together.  A view of up to one window (`WINDOW_ROWS`) is
therefore shuffled perfectly; in a larger one every window still mixes rows from all over the data,
while the disk is read in runs of `BLOCK_ROWS` rows.  Held in memory: one window of row numbers
(8 MiB) and ``prefetch + 2`` batches.

One thread draws the order and hands the row numbers of each batch to ``threads`` that gather them;
the batches come out in the order, whoever is done first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tessera.training.data.batch import Batch
from tessera.training.data.dataset import DatasetView, Rows

BLOCK_ROWS = 1 << 16
WINDOW_BLOCKS = 16
WINDOW_ROWS = BLOCK_ROWS * WINDOW_BLOCKS


class BatchLoader:
    """Batches of ``view``, epoch by epoch.

    Args:
        view: the rows.
        batch_size: samples in a batch; the last one of an epoch may be smaller.
        shuffle: whether an epoch's order is random (see the module) or the view's own.
        seed: of the random order.
        drop_last: leave out a last batch that is smaller than ``batch_size``.
        prefetch: batches that are made ahead of the consumer; 0: none, and no thread.
        threads: how many make them.
        finish: what is done to each batch by the thread that made it, e.g. pinning its memory.
        part: (r, n): of every batch only the r-th of n parts, as even as they can be; together
            they are the batch.  A part of a small last batch may be empty.

    Raises:
        ValueError: ``batch_size`` or ``threads`` below 1, ``prefetch`` or ``seed`` below 0, or no
            such part.
    """

    def __init__(
        self,
        view: DatasetView,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        prefetch: int = 2,
        threads: int = 1,
        finish: Callable[[Batch], Batch] | None = None,
        part: tuple[int, int] = (0, 1),
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
        batch is made is raised here, in its place.

        Raises:
            ValueError: ``epoch`` is negative, or ``start_batch`` outside [0, num_batches].
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: epochs are counted from 0")
        if not 0 <= start_batch <= self._num_batches:
            raise ValueError(
                f"start_batch={start_batch}: an epoch has batches 0 to {self._num_batches}"
            )
        places = self._places(epoch, start_batch, stop_batch)
        if not self._prefetch:
            return map(self._gather, places)
        return _made_ahead(self._gather, places, depth=self._prefetch, threads=self._threads)

    def _places(
        self, epoch: int, start_batch: int, stop_batch: int | None
    ) -> Iterator[Rows | tuple[int, int]]:
        """Each batch's row numbers, or (start, stop) of neighbouring rows of the dataset."""
        order = _EpochOrder(self._view, seed=self._seed, epoch=epoch) if self._shuffle else None
        rows = self._view.rows
        for number in range(start_batch, self._num_batches if stop_batch is None else stop_batch):
            part, parts = self._part
            first, count = number * self._batch_size, self.batch_rows(number)
            start, stop = first + count * part // parts, first + count * (part + 1) // parts
            if start == stop:
                yield np.empty(0, dtype=np.int64)
            elif order is not None:
                yield order.rows(start, stop)
            elif isinstance(rows, range):
                yield rows.start + start, rows.start + stop
            else:
                yield self._view.slice(start, stop)

    def _gather(self, place: Rows | tuple[int, int]) -> Batch:
        dataset = self._view.dataset
        batch = dataset.take(*place) if isinstance(place, tuple) else dataset.batch(place)
        return batch if self._finish is None else self._finish(batch)


class _EpochOrder:
    """The shuffled row numbers of one epoch, by their place in it; see the module."""

    def __init__(self, view: DatasetView, *, seed: int, epoch: int) -> None:
        self._view = view
        self._key = (seed, epoch)
        num_blocks = -(-len(view) // BLOCK_ROWS)
        blocks = np.random.default_rng(self._key).permutation(num_blocks)
        self._windows = [
            blocks[first : first + WINDOW_BLOCKS] for first in range(0, num_blocks, WINDOW_BLOCKS)
        ]
        sizes = [sum(map(self._block_rows, window)) for window in self._windows]
        self._bounds = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._cached: tuple[int, Rows] | None = None

    def rows(self, start: int, stop: int) -> Rows:
        """Row numbers at places ``start`` to ``stop - 1`` of the epoch."""
        parts = []
        window = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            first, end = int(self._bounds[window]), int(self._bounds[window + 1])
            parts.append(self._window(window)[start - first : min(stop, end) - first])
            start = min(stop, end)
            window += 1
        return np.concatenate(parts)

    def _block_rows(self, block: int) -> int:
        return min(BLOCK_ROWS, len(self._view) - block * BLOCK_ROWS)

    def _window(self, number: int) -> Rows:
        if self._cached is None or self._cached[0] != number:
            self._cached = None  # before the next one is made: one window at a time in memory
            rows = np.concatenate(
                [
                    self._view.slice(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
                    for block in map(int, self._windows[number])
                ]
            )
            # number + 1: a trailing 0 would be the generator that drew the blocks
            np.random.default_rng((*self._key, number + 1)).shuffle(rows)
            self._cached = (number, rows)
        return self._cached[1]


X = TypeVar("X")
Y = TypeVar("Y")


def _made_ahead(
    make: Callable[[X], Y], items: Iterator[X], *, depth: int, threads: int
) -> Iterator[Y]:
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
