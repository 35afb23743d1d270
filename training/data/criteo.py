"""Criteo's data as a `Dataset`: a prepared file of row groups, mapped into memory.

The prepared folder (see `prepared`) holds ``rows.bin``: groups of `GROUP_ROWS` rows, each group
``[41, GROUP_ROWS]`` little-endian 32-bit words, so a column of a group is contiguous, as in
Parquet.  What the 41 words are is in `criteo_format`.  The last group is filled up with zeros; the
number of rows is in the manifest.  A row takes 164 bytes; nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.data import criteo_format as fmt
from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.dataset import Rows
from tessera.training.data.malformed import MalformedReport, MalformedRowError

GROUP_ROWS = 1 << 14
ROWS_FILE = "rows.bin"

LAYOUT = 1
"""Goes up with every change of what is written, so that older prepared folders are stale."""

Words = npt.NDArray[np.uint32]

_BITS = np.arange(fmt.NUM_SPARSE, dtype=np.uint32)[:, None]


def write_criteo(
    folder: Path,
    files: Sequence[Path],
    *,
    workers: int,
    strict: bool,
    progress: Callable[[int, MalformedReport], None],
) -> Mapping[str, Any]:
    """Write ``rows.bin`` into ``folder``; memory: `criteo_read`'s and one row group.

    Args:
        folder: an empty folder.
        files: Criteo's text files, in this order.
        workers: parsing processes.
        strict: refuse the first malformed row.
        progress: called with the bytes of source text done since the last call and with what
            was left out so far.

    Returns:
        ``rows``, their number, and ``malformed``, a report's JSON.

    Raises:
        MalformedRowError: under ``strict``.
        UserError: see `read_criteo`.
    """
    rows, malformed = 0, MalformedReport()
    group = np.zeros((fmt.ROW_WORDS, GROUP_ROWS), "<u4")
    parts = read_criteo(files, workers=workers)
    with (folder / ROWS_FILE).open("wb") as out:
        for part in parts:
            malformed += part.malformed
            if strict and malformed.total:
                raise MalformedRowError(malformed.examples[0])
            done = 0
            while done < part.rows.shape[1]:
                place = rows % GROUP_ROWS
                count = min(GROUP_ROWS - place, part.rows.shape[1] - done)
                group[:, place : place + count] = part.rows[:, done : done + count]
                rows, done = rows + count, done + count
                if rows % GROUP_ROWS == 0:
                    out.write(group.data)
            progress(part.source_bytes, malformed)
        if rows % GROUP_ROWS:
            group[:, rows % GROUP_ROWS :] = 0
            out.write(group.data)
    return {"rows": rows, "malformed": malformed.to_json()}


class CriteoDataset:
    """The rows of a prepared folder; see `Dataset` for the methods."""

    dense_names = fmt.DENSE_NAMES
    sparse_names = fmt.SPARSE_NAMES
    dense_transform = fmt.DENSE_TRANSFORM

    def __init__(self, folder: Path, *, rows: int) -> None:
        self._rows = rows
        shape = (-(-rows // GROUP_ROWS), fmt.ROW_WORDS, GROUP_ROWS)
        # An empty file cannot be mapped.
        self._groups: Words = (
            np.asarray(np.memmap(folder / ROWS_FILE, "<u4", "r", shape=shape))
            if rows
            else np.empty(shape, np.uint32)
        )
        self._words = self._groups.reshape(-1)

    def __len__(self) -> int:
        return self._rows

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order."""
        first = _first_words(rows)
        columns = np.empty((fmt.ROW_WORDS, len(rows)), np.uint32)
        for word in range(fmt.ROW_WORDS):
            np.take(self._words, first + word * GROUP_ROWS, out=columns[word], mode="clip")
        return _to_batch(columns)

    def take(self, start: int, stop: int) -> Batch:
        """Rows ``start`` to ``stop - 1``."""
        parts = []
        while start < stop:
            group, place = divmod(start, GROUP_ROWS)
            count = min(GROUP_ROWS - place, stop - start)
            parts.append(self._groups[group, :, place : place + count])
            start += count
        if len(parts) == 1:
            return _to_batch(parts[0])
        empty = np.empty((fmt.ROW_WORDS, 0), np.uint32)
        return _to_batch(np.concatenate([empty, *parts], axis=1))

    def labels(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The labels of these rows."""
        return self._words[_first_words(rows) + fmt.LABEL_WORD * GROUP_ROWS].view(np.float32)


def _first_words(rows: Rows) -> npt.NDArray[np.int64]:
    """Where the word 0 of each row lies in ``rows.bin``, in words."""
    groups, places = np.divmod(rows, GROUP_ROWS)
    return groups * (fmt.ROW_WORDS * GROUP_ROWS) + places


def _to_batch(columns: Words) -> Batch:
    """``[41, B]`` prepared rows (never written to) as a batch with memory of its own."""
    present, categories = columns[fmt.PRESENT_WORD], columns[fmt.SPARSE_WORDS]
    if (present == fmt.ALL_PRESENT).all():
        lengths = np.ones(categories.size, np.int32)
        values = categories.astype(np.int64).ravel()
    else:
        mask = ((present >> _BITS) & np.uint32(1)).astype(np.bool_)
        lengths = mask.ravel().astype(np.int32)
        values = categories[mask].astype(np.int64)
    return make_batch(
        dense=np.ascontiguousarray(columns[fmt.DENSE_WORDS].view(np.float32).T),
        keys=fmt.SPARSE_NAMES,
        lengths=lengths,
        values=values,
        labels=columns[fmt.LABEL_WORD].view(np.float32).copy(),
    )
