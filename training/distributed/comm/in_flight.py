"""Collectives of the CPU that have begun, kept until they are over, also at the end of a program.

A thread of torch's gloo group works a collective off and then gives up its tensors.  If it is the last to have
them, it takes Python's lock, and Python ends every thread that asks for this lock once the interpreter is
being shut down.  It cannot end that one within torch's code: the process aborts with "terminate called without an
active exception".  A pipeline always has exchanges of its next batches on their way, so a program that
stops after some steps may meet this.  Therefore works are kept here, so that such a thread is not the last to
have them, and are waited for before the interpreter is shut down.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from datetime import timedelta
from typing import Protocol, TypeVar

from torch import Tensor

AT_EXIT_S = 2.0  # a rank that ends because of an error has peers that never take part


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


@atexit.register
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
