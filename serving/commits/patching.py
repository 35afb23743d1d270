"""Put a commit's bytes into the records of a package, and make a commit of two states of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tessera.serving.commits.file import Bytes, ReadCommit
from tessera.serving.package.commit import Patch


def rows_of(record: Bytes, patch: Patch, last_row: int) -> Bytes:
    """Rows 0 to ``last_row`` of a patch as a view ``[rows, width]`` of the record's bytes.

    The view must lie within the record; see `ReadCommit.check_fits`.
    """
    return strided(record, patch.offset, patch.stride, patch.width, last_row + 1)


def strided(record: Bytes, offset: int, stride: int, width: int, rows: int) -> Bytes:
    """A view ``[rows, width]`` of a record ``[bytes]``, whose rows begin ``stride`` bytes apart."""
    assert offset + (rows - 1) * stride + width <= len(record), (offset, stride, width, rows)
    view: Bytes = np.lib.stride_tricks.as_strided(
        record[offset:], (rows, width), (stride, 1), writeable=record.flags.writeable
    )
    return view


def apply_patch(record: Bytes, patch: Patch, rows: NDArray[np.int64] | None, new: Bytes) -> Bytes:
    """Put ``new`` ``[count, width]`` into a record's bytes; returns what it replaced, alike.

    Args:
        record: the bytes of ``patch.record``, writable.
        patch: it fits the record.
        rows: ``[count]``, or None for all; see `ReadCommit.rows`.
        new: the new bytes.
    """
    last = patch.count - 1 if rows is None else int(rows[-1])
    view = rows_of(record, patch, last)
    where = slice(None) if rows is None else rows
    old: Bytes = view[where].copy()
    view[where] = new
    return old


def apply_commit(records: dict[str, Bytes], read: ReadCommit) -> None:
    """Patch the records of a package, by name, in place; `ReadCommit.check_fits` has passed."""
    for patch in read.commit.patches:
        apply_patch(records[patch.record], patch, read.rows(patch), read.new_bytes(patch))
