"""A limit on what a package's own code may take while it is loaded: an endless loop must not hold a start.

The code runs inside torch, where nobody can interrupt it, so the process ends.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DEFAULT_LOAD_TIMEOUT_S = 300.0
MAX_LOAD_TIMEOUT_S = 86_400.0
_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TimeLimit:
    """How long a package's code may run, and how the process ends where it runs longer.

    Attributes:
        seconds: for opening, optimizing, warming up and the golden answers together.
        prefix: what the line on stderr begins with, before ``package PATH: ...``.
        status: the exit status.
        tell: told why, from a thread of its own, instead of stderr.
    """

    seconds: float
    prefix: str
    status: int
    tell: Callable[[str], None] | None = None


def ran_too_long(seconds: float) -> str:
    """What is wrong with a package whose code took more than ``seconds``."""
    return (
        f"its model ran longer than --load-timeout-s {seconds:g} while it was loaded; do not use it, "
        "or give it more time"
    )


@contextmanager
def limited(limit: TimeLimit | None, path: Path) -> Iterator[None]:
    """Run the block; where it takes longer than ``limit``, say so in one line and end the process.

    While torch optimizes a graph, no other thread of Python runs.  Should that alone take longer, the process ends
    5 seconds later, with status 1 and Python's own account of where it was.

    Args:
        limit: None: the block may take as long as it likes.
        path: the package, for the line.
    """
    if limit is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        if not done.wait(limit.seconds):
            reason = ran_too_long(limit.seconds)
            if limit.tell is not None:
                limit.tell(reason)
            else:
                line = f"{limit.prefix}package {path}: {reason}\n"
                os.write(2, line.encode(errors="replace"))
            os._exit(limit.status)

    thread = threading.Thread(target=watch, name="load timeout", daemon=True)
    thread.start()
    faulthandler.dump_traceback_later(limit.seconds + _GRACE_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        done.set()
        thread.join()
