"""What is kept for a while, in case that somebody asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from tessera.serving.package.pace import stand_aside
from tessera.serving.server.named_thread import NamedThread

_Thing = TypeVar("_Thing")


class KeptFor(Generic[_Thing]):
    """Things, the oldest first; a thread of low priority lets go of those that nobody has taken.

    Any thread. The thread is there as long as something is kept.

    Args:
        keep_s: seconds after which it lets go of one.
        let_go: called with it, on that thread, which then refers to it no more.
        name: of the thread.
    """

    def __init__(self, keep_s: float, let_go: Callable[[_Thing], None], name: str) -> None:
        self._keep_s, self._let_go, self._name = keep_s, let_go, name
        # A collection of garbage may add something in the midst of `take`, on the same thread.
        self._lock = threading.RLock()
        self._kept: list[tuple[_Thing, float]] = []
        self._running = False

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, thing: _Thing) -> None:
        """Keep it."""
        with self._lock:
            self._kept.append((thing, time.monotonic() + self._keep_s))
            if self._running:
                return
            self._running = True
        try:
            NamedThread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # no thread is left, or the interpreter ends
            self._running = False

    def take(
        self, is_it: Callable[[_Thing], bool] = lambda _: True, *, late: bool = True
    ) -> _Thing | None:
        """The oldest thing of which ``is_it`` says so, which is kept no more; None: there is none.

        Args:
            is_it: called with one after the other.
            late: whether also one whose time has ended, and which is there still.
        """
        now = time.monotonic()
        with self._lock:
            for number, (thing, until) in enumerate(self._kept):
                if (late or until > now) and is_it(thing):
                    del self._kept[number]
                    return thing
        return None

    def _run(self) -> None:
        stand_aside()
        while True:
            ended: _Thing | None = None  # the one before has gone
            with self._lock:
                if not self._kept:
                    self._running = False
                    return
                wait_s = self._kept[0][1] - time.monotonic()
                if wait_s <= 0:
                    ended = self._kept.pop(0)[0]
            if ended is not None:
                self._let_go(ended)
            else:
                time.sleep(wait_s)
