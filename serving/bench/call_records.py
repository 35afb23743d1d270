"""What ``tessera-load --record`` writes, read as arrays: a phase of a benchmark has millions of calls.

A record has one entry after the other: when the call was due, what it took, the number of its request, its status, the
size of its answer, and the answer.  `read_runs` gives calls whose answers have one size together, which numpy can then
compare at once; `read_calls` gives them one by one, in their order.
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEAD = struct.Struct("<qqIII")
_FIELDS = (("due", "<i8"), ("took", "<i8"), ("request", "<u4"), ("code", "<u4"), ("size", "<u4"))
_MOST_CALLS = 1 << 16
"""That are looked at together, which bounds the memory that a record takes."""


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """``n`` measured calls whose answers have ``a`` bytes each.

    Attributes:
        took: what each took from when it was due, ``[n]`` int64, nanoseconds.
        request: the number of its request, ``[n]`` uint32.
        code: gRPC's status, 0 where it was answered, ``[n]`` uint32.
        answers: ``[n, a]`` uint8.
    """

    took: npt.NDArray[np.int64]
    request: npt.NDArray[np.uint32]
    code: npt.NDArray[np.uint32]
    answers: npt.NDArray[np.uint8]

    def where(self, chosen: npt.NDArray[np.bool_], answer_bytes: int) -> CallRun:
        """The calls where ``chosen`` ``[n]`` says so, of whose answers only the first bytes are kept."""
        return CallRun(
            took=self.took[chosen],
            request=self.request[chosen],
            code=self.code[chosen],
            answers=self.answers[chosen, :answer_bytes],
        )

    def distinct(self) -> Iterator[tuple[int, bytes, int]]:
        """Each request and answer of the calls that were answered, and how often the one had the other."""
        right = self.code == 0
        requests = self.request[right].astype("<u4")
        rows = np.hstack([requests[:, None].view(np.uint8), self.answers[right]])
        found, counts = np.unique(rows.view(f"V{rows.shape[1]}"), return_counts=True)
        for row, count in zip(found, counts, strict=True):
            content = row.tobytes()
            yield int.from_bytes(content[:4], "little"), content[4:], int(count)


def read_runs(record: Path) -> Iterator[CallRun]:
    """The calls in a record of ``tessera-load``.

    Raises:
        ValueError: it is cut short.
    """
    if record.stat().st_size == 0:
        return
    with (
        record.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        entries = _entries(record, content)
        while found := list(itertools.islice(entries, _MOST_CALLS)):
            offsets, sizes = np.array(found).T
            end = int(offsets[-1] + _HEAD.size + sizes[-1])
            # A copy: the map cannot end while an array refers to it.
            yield from _alike(content[offsets[0] : end], offsets - offsets[0], sizes)


def _entries(record: Path, content: bytes | mmap.mmap) -> Iterator[tuple[int, int]]:
    """Where each call begins in the content of ``record``, and how many bytes its answer has."""
    at = 0
    while at < len(content):
        end = at + _HEAD.size
        size = _HEAD.unpack_from(content, at)[-1] if end <= len(content) else 0
        if end + size > len(content):
            raise ValueError(f"{record}: it is cut short after {at} bytes")
        yield at, size
        at = end + size


def _alike(
    content: bytes, offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Iterator[CallRun]:
    whole = np.frombuffer(content, np.uint8)
    for size in np.unique(sizes):
        dtype = np.dtype([*_FIELDS, ("answer", "u1", (int(size),))])
        places = offsets[sizes == size][:, None] + np.arange(dtype.itemsize)
        calls = whole[places].view(dtype)[:, 0]
        yield CallRun(
            took=calls["took"],
            request=calls["request"],
            code=calls["code"],
            answers=calls["answer"],
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """One measured call: times in nanoseconds of ``CLOCK_MONOTONIC``, ``code`` 0 where it was answered."""

    due: int
    took: int
    request: int
    code: int
    answer: bytes


def read_calls(record: Path) -> Iterator[Call]:
    """The calls in a record of ``tessera-load``, one after the other.

    Raises:
        ValueError: it is cut short.
    """
    content = record.read_bytes()
    for at, size in _entries(record, content):
        due, took, request, code, _ = _HEAD.unpack_from(content, at)
        begin = at + _HEAD.size
        answer = content[begin : begin + size]
        yield Call(due=due, took=took, request=request, code=code, answer=answer)
