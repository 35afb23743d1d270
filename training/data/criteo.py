"""Criteo's data as a `Dataset`: a prepared file of rows, mapped into memory.

The prepared folder (see `prepared`) holds ``rows.bin``: ``[rows, 41]`` little-endian 32-bit words.
What the 41 words are is in `criteo_format`.  A row takes 164 bytes; nothing is read before it is
asked for.

Rows lie one after the other, because a shuffled epoch reads them one by one: three cache lines of
a row in one place cost far less than 41 in 41 places.  Turning a batch into columns costs as much
as reading it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.data import criteo_format as fmt
from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.dataset import Rows
from tessera.training.data.malformed import MalformedReport, Progress

ROWS_FILE = "rows.bin"

LAYOUT = 3
"""Goes up with every change of what is written, so that older prepared folders are stale."""

Words = npt.NDArray[np.uint32]

_BITS = np.arange(fmt.NUM_SPARSE, dtype=np.uint32)[:, None]  # [26, 1]


def write_criteo(
    files: Sequence[Path], workers: int, folder: Path, progress: Progress
) -> Mapping[str, Any]:
    """Write ``rows.bin`` into the empty ``folder``; memory and errors: `read_criteo`'s.

    Returns:
        ``rows``, their number, and ``malformed``, a report's JSON.
    """
    rows, malformed = 0, MalformedReport()
    with (folder / ROWS_FILE).open("wb") as out:
        for part in read_criteo(files, workers=workers):
            malformed += part.malformed
            out.write(np.ascontiguousarray(part.rows.T, "<u4").data)
            rows += part.rows.shape[1]
            progress(part.source_bytes, malformed)
    return {"rows": rows, "malformed": malformed.to_json()}


class CriteoDataset:
    """The rows of a prepared folder; see `Dataset` for the methods."""

    columns = fmt.COLUMNS

    def __init__(self, folder: Path, *, rows: int) -> None:
        shape = (rows, fmt.ROW_WORDS)
        self._words: Words = np.asarray(np.memmap(folder / ROWS_FILE, "<u4", "r", shape=shape))

    def __len__(self) -> int:
        return len(self._words)

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order."""
        records = np.empty((len(rows), fmt.ROW_WORDS), np.uint32)
        # Rows are in range; with another mode numpy would copy the result once more.
        np.take(self._words, rows, axis=0, out=records, mode="clip")
        return _to_batch(records)

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``."""
        return _to_batch(self._words[start:stop])

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The labels of these rows."""
        labels: npt.NDArray[np.float32] = self._words[rows, fmt.LABEL_WORD].view(np.float32)
        return labels


def _to_batch(records: Words) -> Batch:
    """``[B, 41]`` prepared rows (never written to) as a batch with memory of its own."""
    present = np.ascontiguousarray(records[:, fmt.PRESENT_WORD])
    categories = np.empty((fmt.NUM_SPARSE, len(records)), np.int64)
    categories[...] = records[:, fmt.SPARSE_WORDS].T
    values = categories.ravel()
    if (present == fmt.ALL_PRESENT).all():
        lengths = np.ones(values.size, np.int32)
    else:
        mask = ((present >> _BITS) & np.uint32(1)).astype(np.bool_)
        lengths = mask.ravel().astype(np.int32)
        values = categories[mask]
    return make_batch(
        dense=records[:, fmt.DENSE_WORDS].copy().view(np.float32),
        keys=fmt.SPARSE_NAMES,
        lengths=lengths,
        values=values,
        labels=records[:, fmt.LABEL_WORD].copy().view(np.float32),
    )
