"""A process that goes on from where this one is, with the same memory."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def fork(body: Callable[[], int], *, at_parents_end: signal.Signals) -> int:
    """Run ``body`` in a new process, which ends with the status that it returns.

    The new process takes no signal that is blocked here until it lets it in.  Nothing else runs in it: no handler of an exit, and no thread of this process.

    Args:
        body: what it does.
        at_parents_end: the signal that it is sent when this process ends.

    Returns:
        The new process's id.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, at_parents_end)
        if os.getppid() == parent:
            status = body()
    except BaseException:  # noqa: BLE001 - what called fork must not go on in this process
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(status)
