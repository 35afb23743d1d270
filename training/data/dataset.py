"""What a reader gives to the loader and the trainer: rows by number, and views of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tessera.training.data.batch import Batch
from tessera.training.data.malformed import MalformedReport

Rows = npt.NDArray[np.int64]


class Dataset(Protocol):
    """Prepared rows, numbered from 0.  Safe to read from several threads at once."""

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense features, in their column order."""

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in the order of a batch's keys."""

    @property
    def dense_transform(self) -> str:
        """What was done to the raw dense values, in words for the author of a client."""

    def __len__(self) -> int:
        """The number of rows."""

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order; a number may repeat."""

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``: as ``batch`` of these, but cheaper."""

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """``[len(rows)]`` labels, 0 or 1."""


@dataclass(frozen=True)
class DatasetView:
    """Some rows of a dataset.

    Attributes:
        dataset: where the rows are.
        rows: their numbers, each at most once, as an int64 array (which may be memory-mapped)
            or a range of step 1.
    """

    dataset: Dataset
    rows: Rows | range

    def __len__(self) -> int:
        return len(self.rows)

    def slice(self, start: int, stop: int) -> Rows:
        """The row numbers at positions ``start`` to ``stop - 1`` of this view."""
        part = self.rows[start:stop]
        if isinstance(part, range):
            return np.arange(part.start, part.stop, dtype=np.int64)
        return np.asarray(part)

    def labels(self) -> npt.NDArray[np.float32]:
        """``[len(self)]`` labels, in the view's order."""
        return self.dataset.labels(self.slice(0, len(self)))


@dataclass(frozen=True)
class DataSplits:
    """The three views that a run needs; validation and test may be empty.

    Attributes:
        malformed: what was left out of the files because it could not be read.
    """

    train: DatasetView
    valid: DatasetView
    test: DatasetView
    malformed: MalformedReport
