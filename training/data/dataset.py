"""What a reader gives to the loader and the trainer: rows by number, and views of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tessera.kernels import ops
from tessera.training.data.batch import Batch, PackedBatch
from tessera.training.data.columns import FeatureColumns
from tessera.training.data.malformed import MalformedReport

Rows = npt.NDArray[np.int64]
Part = tuple[int, int]
"""(r, n): the r-th of n parts, from 0."""

BLOCK_ROWS = 1 << 16
WINDOW_BLOCKS = 16
"""How a `DatasetView` is shuffled; see `tessera.training.data.loader`."""


class Described(Protocol):
    """Rows, and what batches of them hold."""

    @property
    def columns(self) -> FeatureColumns:
        """What a batch's columns, keys and labels are."""

    def __len__(self) -> int:
        """The number of rows."""


class Dataset(Described, Protocol):
    """Rows that can be read by number, from 0.  Safe to read from several threads at once."""

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order; a number may repeat."""

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``: as ``batch`` of these, but cheaper."""

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows)]`` labels, 0 or 1."""


class PacksRows(ABC):
    """A `Dataset` that can leave it to the device to make a batch of its rows.

    It needs our library of operators.
    """

    @abstractmethod
    def packed(self, batches: Sequence[Rows]) -> Sequence[PackedBatch]:
        """Pack the rows with these numbers, batch by batch and in this order; page-locked where there is a GPU.

        It is given several batches, because a thread that makes one after the other takes the
        interpreter's lock from the thread that trains several times for each.
        """


class EpochOrder(Protocol):
    """The order of one epoch over a view's rows."""

    def place(self, start: int, stop: int, part: Part = (0, 1)) -> Any:
        """Where the rows are that stand at places ``start`` to ``stop - 1`` of the epoch.

        Called by one thread, with places that ascend from call to call.  With ``part`` (r, n), only the
        r-th of n parts of these rows, which together are all of them.  The parts have as many rows
        as each other, or nearly so; which ones is for the order to choose, so that what one part
        needs of the data, the others need not read.  The part is the same in all calls.
        """

    def gather(self, place: Any) -> Batch:
        """The batch of these rows with their numbers; called by any thread."""

    def close(self) -> None:
        """End what the order has running."""


class View(Protocol):
    """Some rows of a dataset, which a `BatchLoader` makes batches of."""

    @property
    def dataset(self) -> Described:
        """Where the rows are."""

    def __len__(self) -> int:
        """The number of rows."""

    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """``[len(self)]`` labels (``[len(self), L]`` of several), or those of the first ``limit`` rows."""

    def order(self, epoch: int, *, seed: int | None, threads: int) -> EpochOrder:
        """The order of ``epoch``, a function of it and ``seed`` alone; the view's own without a seed.

        ``threads`` is how many threads may read ahead.
        """


class GrowingView(ABC):
    """Training rows of which more arrive while a run trains; a `View` of those that were there first.

    Its batches come from a loader of its own (`tessera.training.data.table.stream_loader`).
    """

    @property
    @abstractmethod
    def dataset(self) -> Described:
        """See `View.dataset`."""

    @property
    @abstractmethod
    def malformed_rows(self) -> int:
        """How many rows were left out because they could not be read, so far."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows were there first."""

    @abstractmethod
    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """See `View.labels`."""

    @abstractmethod
    def order(self, epoch: int, *, seed: int | None, threads: int) -> EpochOrder:
        """See `View.order`."""

    @abstractmethod
    def first_records(self, ledger: Path, *, required: bool = True) -> list[dict[str, Any]]:
        """What ``ledger`` holds, or where it does not exist yet, what is there to begin with.

        Raises:
            UserError: there is nothing to begin with, and something is ``required``.
        """

    @abstractmethod
    def begin(
        self,
        records: list[dict[str, Any]],
        ledger: Path,
        *,
        writes: bool,
        should_stop: Callable[[], bool],
    ) -> None:
        """Go on behind these records; of several ranks one ``writes``, and asks whether to stop."""

    @abstractmethod
    def write_first(self) -> None:
        """Write the records that it began with to the ledger; for the rank that writes."""


@dataclass(frozen=True)
class DatasetView:
    """Some rows of a dataset that can be read by number.

    Attributes:
        dataset: where the rows are.
        rows: their numbers, each at most once, as an int64 array (which may be memory-mapped)
            or a range of step 1.
        packs: whether shuffled batches come as a `PackedBatch`; the dataset is one that `PacksRows`.
    """

    dataset: Dataset
    rows: Rows | range
    packs: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> Rows:
        """The row numbers at positions ``start`` to ``stop - 1`` of this view."""
        part = self.rows[start:stop]
        if isinstance(part, range):
            return np.arange(part.start, part.stop, dtype=np.int64)
        return np.asarray(part)

    def labels(self, limit: int | None = None) -> npt.NDArray[np.float32]:
        """See `View.labels`."""
        return self.dataset.labels(self.slice(0, len(self) if limit is None else limit))

    def order(self, epoch: int, *, seed: int | None, threads: int) -> EpochOrder:
        """See `View.order`; nothing is read ahead of a batch, and one thread shuffles ahead."""
        del threads
        return _OwnOrder(self) if seed is None else _ShuffledOrder(self, seed=seed, epoch=epoch)


def packing(view: View) -> View:
    """A view of the same rows whose shuffled batches come packed, or ``view`` where its dataset does not."""
    packs = isinstance(view, DatasetView) and isinstance(view.dataset, PacksRows)
    if packs and ops.is_built_for("pack_rows", "cpu"):
        assert isinstance(view, DatasetView)
        return replace(view, packs=True)
    return view


def cut_evenly(start: int, stop: int, part: Part) -> tuple[int, int]:
    """The places ``start`` to ``stop - 1`` cut to parts that differ by one at most: where one is."""
    number, parts = part
    count = stop - start
    return start + count * number // parts, start + count * (number + 1) // parts


def _numbered(batch: Batch, rows: Rows) -> Batch:
    batch.row_numbers = torch.from_numpy(np.array(rows))  # the view's own may not be writable
    return batch


class _OwnOrder:
    """The rows in the view's order; see `EpochOrder`."""

    def __init__(self, view: DatasetView) -> None:
        self._view = view

    def place(self, start: int, stop: int, part: Part = (0, 1)) -> Rows | tuple[int, int]:
        """Row numbers, or (start, stop) of neighbouring rows of the dataset."""
        start, stop = cut_evenly(start, stop, part)
        rows = self._view.rows
        if isinstance(rows, range) and start < stop:
            return rows.start + start, rows.start + stop
        return self._view.slice(start, stop)

    def gather(self, place: Rows | tuple[int, int]) -> Batch:
        if not isinstance(place, tuple):
            return _numbered(self._view.dataset.batch(place), place)
        return _numbered(self._view.dataset.take(*place), np.arange(*place, dtype=np.int64))

    def close(self) -> None:
        """Nothing runs."""


class _ShuffledOrder:
    """The rows shuffled by windows; see `tessera.training.data.loader`."""

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
        # Shuffling a window takes as long as training on many of its rows: it is done ahead.
        self._drawing = ThreadPoolExecutor(1, "tessera-window")
        self._drawn: dict[int, Future[Rows]] = {}

    def place(self, start: int, stop: int, part: Part = (0, 1)) -> Rows:
        """Row numbers at places ``start`` to ``stop - 1`` of the epoch."""
        start, stop = cut_evenly(start, stop, part)
        parts = [np.empty(0, np.int64)]
        window = int(np.searchsorted(self._bounds, start, side="right")) - 1
        while start < stop:
            first, end = int(self._bounds[window]), int(self._bounds[window + 1])
            parts.append(self._window(window)[start - first : min(stop, end) - first])
            start = min(stop, end)
            window += 1
        return np.concatenate(parts)

    def gather(self, place: Rows) -> Batch:
        return _numbered(self._view.dataset.batch(place), place)

    def close(self) -> None:
        """Shuffle no further."""
        self._drawing.shutdown(cancel_futures=True)

    def _block_rows(self, block: int) -> int:
        return min(BLOCK_ROWS, len(self._view) - block * BLOCK_ROWS)

    def _window(self, number: int) -> Rows:
        """The rows of a window; the next one is shuffled from now on, and those before it forgotten."""
        for passed in [key for key in self._drawn if key < number]:
            del self._drawn[passed]
        for key in (number, number + 1):
            if key not in self._drawn and key < len(self._windows):
                self._drawn[key] = self._drawing.submit(self._draw, key)
        return self._drawn[number].result()

    def _draw(self, number: int) -> Rows:
        rows = np.concatenate(
            [
                self._view.slice(block * BLOCK_ROWS, (block + 1) * BLOCK_ROWS)
                for block in map(int, self._windows[number])
            ]
        )
        # number + 1: a trailing 0 would be the generator that drew the blocks
        np.random.default_rng((*self._key, number + 1)).shuffle(rows)
        return rows


@dataclass(frozen=True)
class DataSplits:
    """The three views that a run needs; validation and test may be empty.

    Attributes:
        malformed: what was left out of the files because it could not be read.
    """

    train: View
    valid: View
    test: View
    malformed: MalformedReport
