"""Criteo's data as a `Dataset`: a prepared file of rows, mapped into memory.

The prepared folder (see `prepared`) holds ``rows.bin``: ``[rows, 41]`` little-endian 32-bit words.
What the 41 words are is in `criteo_format`.  A row takes 164 bytes; nothing is read before it is
asked for.

Rows lie one after the other, because a shuffled epoch reads them one by one: three cache lines of
a row in one place cost far less than 41 in 41 places.  Turning a batch into columns costs a processor more
than reading it, so a GPU that trains does that itself (`PackedRows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.training.data import criteo_format as fmt
from tessera.training.data.batch import Batch, PackedBatch, make_batch
from tessera.training.data.criteo_read import read_criteo
from tessera.training.data.dataset import PacksRows, Rows
from tessera.training.data.malformed import MalformedReport, Progress
from tessera.training.data.read_only import read_only_tensor
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

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


class CriteoDataset(PacksRows):
    """The rows of a prepared folder; see `Dataset` for the methods."""

    columns = fmt.COLUMNS

    def __init__(self, folder: Path, *, rows: int) -> None:
        shape = (rows, fmt.ROW_WORDS)
        self._words: Words = np.asarray(np.memmap(folder / ROWS_FILE, "<u4", "r", shape=shape))
        self._table = read_only_tensor(self._words.view(np.int32))

    def __len__(self) -> int:
        return len(self._words)

    def batch(self, rows: Rows) -> Batch:
        """The rows with these numbers, in this order."""
        # Rows are in range; with another mode numpy would copy the result once more.
        return _to_batch(np.take(self._words, rows, axis=0, mode="clip"))

    def packed(self, batches: Sequence[Rows]) -> list[PackedRows]:
        """See `PacksRows`."""
        ends = list(itertools.accumulate(map(len, batches)))
        pinned = torch.cuda.is_available()
        shape = (ends[-1] if ends else 0, fmt.ROW_WORDS)
        words = torch.empty(shape, dtype=torch.int32, pin_memory=pinned)
        rows = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *batches]))
        counts = torch.ops.tessera.pack_rows(
            self._table, rows, words, fmt.PRESENT_WORD, fmt.NUM_SPARSE, ends
        )
        return [
            PackedRows(words[end - len(rows) : end], count)
            for rows, end, count in zip(batches, ends, counts, strict=True)
        ]

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


@dataclass(frozen=True)
class PackedRows(PackedBatch):
    """Prepared rows in host memory.

    Attributes:
        words: ``[B, 41]`` int32, the bits of the prepared rows.
        ids: how many of the rows' categories are there.
    """

    words: Tensor
    ids: int

    @property
    def size(self) -> int:
        """See `PackedBatch`."""
        return len(self.words)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """See `PackedBatch`; the host does not wait for the device."""
        words = self.words.to(device, non_blocking=non_blocking)
        unpack = (
            unpack_rows if ops.is_built_for("unpack_rows", device.type) else unpack_rows_by_torch
        )
        lengths, offsets, values = unpack(words, self.ids)
        numbers = words.view(torch.float32)
        return Batch(
            numbers[:, fmt.DENSE_WORDS],
            KeyedJaggedTensor(
                list(fmt.SPARSE_NAMES),
                values,
                lengths=lengths,
                offsets=offsets,
                stride=self.size,
                validate=False,
            ),
            numbers[:, fmt.LABEL_WORD],
        )


def unpack_rows(words: Tensor, ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, offsets and values of prepared rows, of which so many ids are there, by our operator."""
    first, features = fmt.SPARSE_WORDS.start, fmt.NUM_SPARSE
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.tessera.unpack_rows(
        words, fmt.PRESENT_WORD, first, features, ids
    )
    return found


def unpack_rows_by_torch(words: Tensor, ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's functions, for devices that the operator was not built for."""
    bits_F1 = torch.arange(fmt.NUM_SPARSE, dtype=torch.int32, device=words.device).unsqueeze(1)
    lengths = (words[:, fmt.PRESENT_WORD] >> bits_F1).bitwise_and_(1).flatten()
    offsets = torch.empty(len(lengths) + 1, dtype=torch.int64, device=words.device)
    offsets[:1] = 0
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    categories_FB = words[:, fmt.SPARSE_WORDS].view(torch.uint32).t()
    values = categories_FB.to(torch.int64, memory_format=torch.contiguous_format).flatten()
    if ids < len(values):
        # The n-th id that is there goes to place n, from 1 on, and what is missing to place 0.
        places = offsets[1:] * lengths
        values = values.new_empty(ids + 1).scatter_(0, places, values)[1:]
    return lengths, offsets, values
