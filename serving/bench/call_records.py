"""What ``tessera-load --record`` writes, read as arrays: a phase of a benchmark has millions of calls.

A record has one entry after the other: when the call was due, what it took, the number of its request, its status, the
size of its answer, and the answer.  Consecutive calls whose answers have one size are read at once (`CallRun`), as
nearly all of a benchmark's have.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEAD = (("due", "<i8"), ("took", "<i8"), ("request", "<u4"), ("code", "<u4"), ("size", "<u4"))
_HEAD_BYTES = np.dtype(list(_HEAD)).itemsize
_MOST_CALLS = 1 << 16
"""In one run, which bounds what a record takes of memory, and what is looked at in vain where sizes differ."""


@dataclass(frozen=True, kw_only=True)
class CallRun:
    """``n`` measured calls, one after the other, whose answers have ``a`` bytes each.

    Attributes:
        due: when each was due, ``[n]`` int64, nanoseconds of ``CLOCK_MONOTONIC``.
        took: what it took from then on, ``[n]`` int64, nanoseconds.
        request: the number of its request, ``[n]`` uint32.
        code: gRPC's status, 0 where it was answered, ``[n]`` uint32.
        answers: ``[n, a]`` uint8.
    """

    due: npt.NDArray[np.int64]
    took: npt.NDArray[np.int64]
    request: npt.NDArray[np.uint32]
    code: npt.NDArray[np.uint32]
    answers: npt.NDArray[np.uint8]

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
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as all_,
    ):
        at = 0
        while at < len(all_):
            calls = _run_at(all_, at)
            if calls is None:
                raise ValueError(f"{record}: it is cut short after {at} bytes")
            at += calls.nbytes
            yield CallRun(
                due=calls["due"],
                took=calls["took"],
                request=calls["request"],
                code=calls["code"],
                answers=calls["answer"],
            )


def _run_at(content: mmap.mmap, at: int) -> npt.NDArray[np.void] | None:
    """The calls from byte ``at`` on that are alike, a copy; None: not even one is whole."""
    size = int.from_bytes(content[at + _HEAD_BYTES - 4 : at + _HEAD_BYTES], "little")
    dtype = np.dtype([*_HEAD, ("answer", "u1", (size,))])
    whole = (len(content) - at) // dtype.itemsize
    if len(content) - at < _HEAD_BYTES or whole == 0:
        return None
    calls = np.frombuffer(content[at : at + min(whole, _MOST_CALLS) * dtype.itemsize], dtype)
    other = np.flatnonzero(calls["size"] != size)
    found: npt.NDArray[np.void] = calls[: other[0]] if len(other) else calls
    return found


@dataclass(frozen=True, kw_only=True)
class Call:
    """One measured call: times in nanoseconds of ``CLOCK_MONOTONIC``, ``code`` 0 where it was answered."""

    due: int
    took: int
    request: int
    code: int
    answer: bytes


def read_calls(record: Path) -> Iterator[Call]:
    """The same, call by call.

    Raises:
        ValueError: it is cut short.
    """
    for run in read_runs(record):
        for due, took, request, code, answer in zip(
            *(each.tolist() for each in (run.due, run.took, run.request, run.code)),
            run.answers,
            strict=True,
        ):
            yield Call(due=due, took=took, request=request, code=code, answer=answer.tobytes())
