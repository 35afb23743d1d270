"""The end of a program whose ranks exchange tensors over gloo: collectives of the CPU are over, and their threads idle.

A thread of torch's gloo group works a collective off and then gives up its tensors.  If it is the last to have
them, it takes Python's lock, and Python ends every thread that asks for this lock once the interpreter is
being shut down (up to Python 3.13).  It cannot end that one within torch's code: the process aborts with "terminate
called without an active exception".  Two things are done about it before the interpreter is shut down:

* A pipeline always has exchanges of its next batches on their way.  The library's own works are kept here until
  they are over, so that such a thread is not the last to have them, and are waited for.
* A collective that a program waits for itself (``dist.all_gather``, ``dist.reduce``, what torchmetrics gathers) is over for
  the program before its thread has given up the tensors.  If the program ends at once, that thread may still wait for
  Python's lock.  Therefore the main thread gives the lock up until no thread of gloo has anything to do.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Protocol, TypeVar

from torch import Tensor

AT_EXIT_S = 2.0  # a rank that ends because of an error has peers that never take part
PAUSE_S = 0.0005  # long enough that a thread which waits for Python's lock is given it, and so is seen to run
# A thread that waits behind another one for the lock is given it in the second pause.
IDLE_PAUSES = 2
THREADS_OF_GLOO = "pt_gloo_runloop"  # the name that torch gives them


class Work(Protocol):
    """What is needed of a `torch.distributed.Work`."""

    def is_completed(self) -> bool:
        """Whether it is over, well or with an error."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Returns when it is over; raises what went wrong, or a `RuntimeError` after the time."""


AnyWork = TypeVar("AnyWork", bound=Work)
_works: list[Work] = []


def kept(work: AnyWork, sent: Tensor) -> AnyWork:
    """``work``, which sends ``sent``, kept until it is over and the next one has begun; on a GPU it is left alone."""
    if sent.is_cpu:
        _works[:] = [each for each in _works if not each.is_completed()]
        _works.append(work)
    return work


def wait_for_works(limit_s: float = AT_EXIT_S) -> None:
    """Waits for all works that are not over, ``limit_s`` seconds at most for all together."""
    until = time.monotonic() + limit_s
    for work in _works:
        left = until - time.monotonic()
        if left <= 0:
            return
        if not work.is_completed():
            with contextlib.suppress(RuntimeError):  # a peer has gone, or the time is over
                work.wait(timedelta(seconds=left))


def _threads_of_gloo() -> list[Path]:
    """The files in which Linux tells the states of this process's gloo threads; empty on other systems."""
    found = []
    for file in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            if f"({THREADS_OF_GLOO})" in file.read_text(encoding="utf-8", errors="replace"):
                found.append(file)
    return found


def _is_busy(thread: Path) -> bool:
    """Whether a thread runs, or would if a CPU or the disk were free; not one that waits for a message or a lock."""
    try:
        fields = thread.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return False
    return fields[0] in {"R", "D"}


def wait_for_threads(limit_s: float = AT_EXIT_S) -> None:
    """Gives up Python's lock until no thread of gloo has anything to do, for ``limit_s`` seconds at most.

    That is a millisecond where all are idle already, and nothing where there are none.  A thread that waits for a message
    of another rank counts as idle.
    """
    threads = _threads_of_gloo()
    until = time.monotonic() + limit_s
    idle = 0 if threads else IDLE_PAUSES
    while idle < IDLE_PAUSES and time.monotonic() < until:
        time.sleep(PAUSE_S)
        idle = 0 if any(map(_is_busy, threads)) else idle + 1


@atexit.register
def _at_exit() -> None:
    wait_for_works()
    wait_for_threads()
