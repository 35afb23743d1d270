"""A limit on what a package's own code may take while it is loaded: an endless loop must not hold a start.

The code runs inside torch, where nobody can interrupt it, so the process ends.
"""

from __future__ import annotations

import faulthandler
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

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
        of_cpu: what counts is the time that this process uses of CPUs.  That is for one that runs while CPUs have nothing
            else to do (`idle_process`): a package is not refused because others were served meanwhile.
    """

    seconds: float
    prefix: str
    status: int
    tell: Callable[[str], None] | None = None
    of_cpu: bool = False


def ran_too_long(seconds: float) -> str:
    """What is wrong with a package whose code took more than ``seconds``."""
    return (
        f"its model ran longer than --load-timeout-s {seconds:g} while it was loaded; do not use it, "
        "or give it more time"
    )


def limited(limit: TimeLimit | None, path: Path) -> AbstractContextManager[None]:
    """Run a block; where it takes longer than ``limit``, say so in one line and end the process.

    What this returns may be entered again once the block has ended: the blocks' times are added up, and what passes
    between them does not count.

    While torch optimizes a graph, no other thread of Python runs.  Should that alone take longer, the process ends
    5 seconds later, with status 1 and Python's own account of where it was, or by a signal where CPUs' time counts.

    Args:
        limit: None: the block may take as long as it likes.
        path: the package, for the line.
    """
    return nullcontext() if limit is None else _Limited(limit, path)


class _Limited(AbstractContextManager[None]):
    """See `limited`."""

    def __init__(self, limit: TimeLimit, path: Path) -> None:
        self._limit = limit
        self._path = path
        self._left_s = limit.seconds
        self._block: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._block = self._watched()
        self._block.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return self._block.__exit__(kind, error, trace)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        limit, done = self._limit, threading.Event()
        clock = time.process_time if limit.of_cpu else time.monotonic
        end = clock() + self._left_s

        def watch() -> None:
            left = self._left_s
            while not (ended := done.wait(left)) and (left := end - clock()) > 0:
                pass
            if not ended:
                self._end()

        thread = threading.Thread(target=watch, name="load timeout", daemon=True)
        thread.start()
        with _cpu_limit(self._left_s) if limit.of_cpu else _wall_limit(self._left_s):
            try:
                yield
            finally:
                done.set()
                thread.join()
                self._left_s = max(end - clock(), 0.0)

    def _end(self) -> None:
        limit, reason = self._limit, ran_too_long(self._limit.seconds)
        if limit.tell is not None:
            limit.tell(reason)
        else:
            line = f"{limit.prefix}package {self._path}: {reason}\n"
            os.write(2, line.encode(errors="replace"))
        os._exit(limit.status)


@contextmanager
def _wall_limit(seconds: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """By the kernel: SIGXCPU ends the process."""
    before = resource.getrlimit(resource.RLIMIT_CPU)
    least = [limit for limit in before if limit != resource.RLIM_INFINITY]
    limit = min([math.ceil(time.process_time() + seconds + _GRACE_S), *least])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)
