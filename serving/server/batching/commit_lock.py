"""Keeps commits and forward passes apart: many passes at a time, or one commit.

Each pass holds the lock from before its first lookup until its scores are there, so that it sees one state whole.
Who wants to change the state comes before passes that have not begun: under load there is always a next one.

Where a new state can be made beside the one that passes see, nobody waits for a pass, and no pass for a commit: `switch`
has those that begin from then on see the new one, and `wait_for_passes` tells when the last of the others has ended,
which is read-copy-update (McKenney and Slingwine, "Read-Copy Update", 1998).
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.serving.package.runner import Runner


@dataclass(frozen=True, slots=True)
class PassState:
    """What a pass sees.

    Attributes:
        commit: the last commit of the state; 0: the package itself.
        runner: the instance of the model that has this state; None: that which the pass knows.
    """

    commit: int = 0
    runner: Runner | None = None


class CommitLock:
    """A readers-writer lock around the state of one model; any thread.

    Attributes:
        state: what passes that begin now see.  It changes under `exclusive`, and by `switch`.
    """

    def __init__(self) -> None:
        self.state = PassState()
        self._changed = threading.Condition()
        self._turn = 0
        self._passes: Counter[int] = Counter()  # by the turn in which they began
        self._writers = 0  # that change the state, or wait for it
        self._writing = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[PassState]:
        """Hold the state as it is, and give it.  May not be entered again by the thread that is inside."""
        with self._changed:
            while self._writers:
                self._changed.wait()
            turn, state = self._turn, self.state
            self._passes[turn] += 1
        try:
            yield state
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

    def switch(self, state: PassState) -> None:
        """From now on passes see ``state``; those that have begun go on with the one that they have."""
        with self._changed:
            self.state = state

    def wait_for_passes(self) -> None:
        """Wait until the passes that have begun by now have ended; others begin meanwhile."""
        with self._changed:
            last = self._turn
            self._turn += 1
            while any(turn <= last for turn in self._passes):
                self._changed.wait()
