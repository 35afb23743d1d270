"""Threads whose names `top -H`, `perf` and ``/proc/PID/task/*/comm`` show.

Python tells the kernel a thread's name from 3.14 on.  Before that all threads of a process have the name of its first
one, so that nobody sees which of them computes.  The names are those of the C++ server
(``cpp_server/src/common/thread_name.h``); docs/operations.md lists them.
"""

from __future__ import annotations

import ctypes
import sys
import threading

MOST_CHARACTERS = 15
"""The kernel keeps no more."""

_PR_SET_NAME = 15  # prctl(2)


class NamedThread(threading.Thread):
    """A thread that bears its name for the kernel as well, of which `MOST_CHARACTERS` ASCII characters are kept."""

    def run(self) -> None:
        """Take the name, then do what a thread does."""
        name_this_thread(self.name)
        super().run()


def name_this_thread(name: str) -> None:
    """Name the calling thread for the kernel.  Threads that it starts, such as torch's, have its name as well."""
    if sys.version_info < (3, 14) and sys.platform == "linux":
        kept = name.encode("ascii", "replace")[:MOST_CHARACTERS]
        # It fails where a sandbox forbids it, which costs the name alone.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, kept, 0, 0, 0)
