"""Work in a process that runs while CPUs have nothing else to do, and once more where they always have.

A process of the class ``SCHED_IDLE`` gives its CPU at once to whoever wakes up there, and where the kernel looks for a CPU for a
thread that wakes up, one that runs only such processes counts as free.  But it has a three-hundredth of a CPU that others want all
the time, and cannot go back to another class without privileges.  ``kernels/csrc/idle_thread.h`` does the same with threads.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from tessera.serving.server.forked import fork

_ENDED = {signal.SIGCHLD}


@dataclass(frozen=True)
class Patience:
    """How little of a CPU, and for how many seconds, is too little."""

    share: float = 0.01
    length_s: float = 2.0


def _cpu_seconds(pid: int) -> float:
    """What a process that was not waited for has used of CPUs; Linux' number of a process's clock."""
    return time.clock_gettime((~pid << 3) | 2)


def be_idle() -> None:
    """Have this process run while CPUs have nothing else to do, for good."""
    with contextlib.suppress(OSError):  # it runs as it is
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def is_idle() -> bool:
    """Whether this process does."""
    return os.sched_getscheduler(0) == os.SCHED_IDLE


class Starvation:
    """Whether a process that has work gets too little of a CPU.

    Args:
        pid: of a process that is there, or has ended and was not waited for; `OSError` is raised of another.
        patience: for how long it may have too little.
    """

    def __init__(self, pid: int, patience: Patience) -> None:
        self._pid = pid
        self._patience = patience
        self._begin, self._used = time.monotonic(), _cpu_seconds(pid)

    def seen(self) -> bool:
        """Whether it has had too little since this was asked last, which is to be about ``patience.length_s`` ago."""
        begin, used = self._begin, self._used
        self._begin, self._used = time.monotonic(), _cpu_seconds(self._pid)
        return self._used - used < self._patience.share * (self._begin - begin)


def _watch(pid: int, patience: Patience) -> int | None:
    """The exit status of process ``pid``, or None once it has had too little of a CPU; blocks."""
    starvation = Starvation(pid, patience)
    while signal.sigtimedwait(_ENDED, patience.length_s) is None:
        if starvation.seen():
            return None
    return _status(pid)


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_when_idle(body: Callable[[], int], patience: Patience = Patience()) -> int:
    """Run ``body`` in a process of that class; where it has too little of a CPU, end it and run ``body`` in this one.

    To be called in a process with a single thread.  The other one is killed with this one.

    Args:
        body: gives an exit status, and leaves nothing behind that it would find when it is begun again.
        patience: for how long it may have too little.

    Returns:
        The status: the one of ``body``, or ``128 + N`` where signal ``N`` ended it.
    """

    def idle() -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDED)
        be_idle()
        return body()

    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whose end is ignored cannot be waited for
    pid = fork(idle, at_parents_end=signal.SIGKILL)
    status = _watch(pid, patience)
    if status is not None:
        return status if status >= 0 else 128 - status
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # to end it needs a CPU; this takes a privilege
        os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))
    _status(pid)
    return body()
