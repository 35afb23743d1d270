"""Work that goes on beside answering: in short pieces, which take no more than a share of one CPU.

A priority alone does not do: a thread of the lowest one that has a CPU often keeps it until the scheduler's next
tick, and one that waits for a CPU while it holds the interpreter's lock lets all others of its process wait.  A slice
of the work's own says more: see `stand_aside`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import threading
import time

from tessera.cpus import usable_cpus

ASIDE_NICENESS = 10
"""The nice level of such work: behind inference, and with some progress on a machine whose CPUs are all in use."""

_SHARE_OF_ALL = 1 / 10
_SHARE_OF_ONE = 1 / 3
_LEAST_S = 0.0001
_MOST_S = 0.05
"""A piece that took longer than it should is not paid for by seconds of silence."""

_SLICE_NS = 100_000_000
_SCHED_SETATTR = {
    "x86_64": 314,
    "aarch64": 274,
}  # <asm/unistd.h>; glibc has no function before 2.41
_KEEP_POLICY = 0x08  # SCHED_FLAG_KEEP_POLICY, <linux/sched.h>
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")  # struct sched_attr of sched_setattr(2)


def stand_aside() -> None:
    """Give the calling thread `ASIDE_NICENESS` and the longest slice; Linux gives threads their own, which others inherit.

    Linux' scheduler (EEVDF, from 6.12 on with a slice for each thread; Documentation/scheduler/sched-eevdf.rst) lets a
    thread that becomes ready take the CPU of one with a longer slice at once, and otherwise not before that one's
    slice has ended, which is seen at a tick, up to 4 ms later.  Where either is refused the thread runs as it is.
    """
    this = threading.get_native_id()
    with contextlib.suppress(OSError):
        niceness = max(os.getpriority(os.PRIO_PROCESS, this), ASIDE_NICENESS)
        os.setpriority(os.PRIO_PROCESS, this, niceness)
        number = _SCHED_SETATTR.get(platform.machine())
        if number is not None:
            wanted = (_ATTRIBUTES.size, 0, _KEEP_POLICY, niceness, 0, _SLICE_NS, 0, 0)
            ctypes.CDLL(None).syscall(number, this, _ATTRIBUTES.pack(*wanted), 0)


def aside_share(cpus: int) -> float:
    """What such work may use of one CPU where a process may use ``cpus``: a tenth of all, a third of one at most."""
    return min(_SHARE_OF_ALL * cpus, _SHARE_OF_ONE)


def pause_behind(used: float, passed: float, share: float) -> float:
    """How long the pause is behind ``used`` seconds of a CPU, within ``passed`` since the last pause; 0: not yet."""
    pause = min(used / share - passed, _MOST_S)
    return 0.0 if pause < _LEAST_S else pause


class Pace:
    """The pauses of one thread."""

    def __init__(self) -> None:
        self._share = aside_share(usable_cpus())
        self._last = time.monotonic()
        self._used = time.thread_time()

    def rest(self) -> None:
        """Sleep until the thread has used `aside_share` of the time since the last pause; to be called between pieces."""
        used, passed = time.thread_time() - self._used, time.monotonic() - self._last
        pause = pause_behind(used, passed, self._share)
        # Time that has passed without a CPU does not count later.
        if not pause and passed < used + _MOST_S:
            return
        if pause:
            time.sleep(pause)
        self._last = time.monotonic()
        self._used = time.thread_time()
