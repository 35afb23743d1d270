"""Keeps commits and forward passes apart: many passes at a time, or one commit.

Each pass holds the lock from before its first lookup until its scores are there, so that it sees one state whole.
Who wants to change the state comes before passes that have not begun: under load there is always a next one.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator


class CommitLock:
    """A readers-writer lock around the state of one model, and the commit that this state is; any thread.

    Attributes:
        commit: the number of the last commit in the state; 0: the package itself.  It changes only under
            `exclusive`.
    """

    def __init__(self) -> None:
        self.commit = 0
        self._changed = threading.Condition()
        self._turn = 0
        self._passes: Counter[int] = Counter()  # by the turn in which they began
        self._writers = 0  # that change the state, or wait for it
        self._writing = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[int]:
        """Hold the state as it is; gives its commit.  May not be entered again by the thread that is inside."""
        with self._changed:
            while self._writers:
                self._changed.wait()
            turn = self._turn
            self._passes[turn] += 1
        try:
            yield self.commit
        finally:
            with self._changed:
                self._passes[turn] -= 1
                if not self._passes[turn]:
                    del self._passes[turn]
                    self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the state alone, to change it: passes that have begun are waited for, no other begins."""
        with self._changed:
            self._writers += 1
            while self._passes or self._writing:
                self._changed.wait()
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._writers -= 1
                self._changed.notify_all()

    def wait_for_passes(self) -> None:
        """Wait until the passes that have begun by now have ended; others begin meanwhile."""
        with self._changed:
            last = self._turn
            self._turn += 1
            while any(turn <= last for turn in self._passes):
                self._changed.wait()
