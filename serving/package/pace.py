"""Work that goes on beside answering: in short pieces, which take no more than a share of one CPU.

A priority alone does not do: a thread of the lowest one that has a CPU often keeps it until the scheduler's next
tick, and one that waits for a CPU while it holds the interpreter's lock lets all others of its process wait.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time

from tessera.cpus import usable_cpus

ASIDE_NICENESS = 10
"""The nice level of such work: behind inference, and with some progress on a machine whose CPUs are all in use."""

_SHARE_OF_ALL = 1 / 10
_SHARE_OF_ONE = 1 / 3
LOAD_PART = 0.5
"""What reading and taking over a version uses of its share.  At the end of each load calls wait for the opening of a model, so
fewer loads in a minute also have fewer such calls (docs/benchmarks.md, "Reloads under load")."""
_MANY_CPUS = 8
"""From so many on, a load for GPUs may use more; see `load_share`."""
_PIECE_S = 0.0001
"""Work that has used so much of a CPU, and waited for one for half as long, pauses."""
_LEAST_S = 0.0001
_MOST_S = 0.05
"""A piece that took longer than it should is not paid for by seconds of silence."""


def stand_aside() -> None:
    """Give the calling thread `ASIDE_NICENESS`; Linux gives threads a niceness of their own, which others inherit."""
    with contextlib.suppress(OSError):
        this = threading.get_native_id()
        if os.getpriority(os.PRIO_PROCESS, this) < ASIDE_NICENESS:
            os.setpriority(os.PRIO_PROCESS, this, ASIDE_NICENESS)


def aside_share(cpus: int) -> float:
    """What such work may use of one CPU where a process may use ``cpus``: a tenth of all, a third of one at most."""
    return min(_SHARE_OF_ALL * cpus, _SHARE_OF_ONE)


def load_share(device: str, cpus: int) -> float:
    """What reading a version may use of one CPU beside the versions that answer.

    That is `LOAD_PART` of `aside_share`, which comes from measurements of models for CPUs on two CPUs, where a load
    takes CPUs, and the interpreter's lock, from calls.  Calls of a model for GPUs are computed there, and a load of one
    reads, hashes and copies to the device, all of which it does without the interpreter's lock.  Where there are many
    CPUs, it may therefore use a tenth of them, and one at most: at a sixth of one, 10 GB would take half a minute or more
    for hashing alone.

    Args:
        device: the kind of device that the package is for.
        cpus: what the process may use.
    """
    if device == "cpu" or cpus < _MANY_CPUS:
        return LOAD_PART * aside_share(cpus)
    return min(_SHARE_OF_ALL * cpus, 1.0)


def load_pace(device: str) -> Pace:
    """The pauses of the calling thread, which reads a version for this kind of device beside others that answer."""
    return Pace(part=load_share(device, _cpus()) / _share())


@functools.cache
def _cpus() -> int:
    """What this process may use; control groups' files are read once, as a server has a pace for each commit."""
    return usable_cpus()


@functools.cache
def _share() -> float:
    """What this process's threads may use."""
    return aside_share(_cpus())


def pause_behind(used: float, passed: float, share: float) -> float:
    """How long the pause is behind ``used`` seconds of a CPU, within ``passed`` since the last pause; 0: not yet.

    Work that has waited for a CPU pauses behind each piece all the same: Linux brings threads that wait behind each other
    on one CPU to another one when that one has nothing left to run, and while such work waits there, it always has.
    """
    pause = min(used / share - passed, _MOST_S)
    if pause >= _LEAST_S:
        return pause
    waited = used >= _PIECE_S and passed - used >= _PIECE_S / 2
    return _LEAST_S if waited else 0.0


def no_rest() -> None:
    """The pause of work that goes on at once."""


class Pace:
    """The pauses of one thread.

    Args:
        for_s: seconds after which there are no more.
        part: of what such work may use.

    Attributes:
        share: of one CPU, what the thread uses.
    """

    def __init__(self, for_s: float = math.inf, part: float = 1.0) -> None:
        self.share = part * _share()
        self._until = time.monotonic() + for_s
        self._last = time.monotonic()
        self._used = time.thread_time()

    @property
    def left_s(self) -> float:
        """Seconds after which there are no more pauses."""
        return max(self._until - time.monotonic(), 0.0)

    def rest(self) -> None:
        """Sleep until the thread has used `aside_share` of the time since the last pause; to be called between pieces."""
        now = time.monotonic()
        if now >= self._until:
            return
        used, passed = time.thread_time() - self._used, now - self._last
        pause = pause_behind(used, passed, self.share)
        # Time that has passed without a CPU does not count later.
        if not pause and passed < used + _MOST_S:
            return
        if pause:
            time.sleep(pause)
        self._last = time.monotonic()
        self._used = time.thread_time()
