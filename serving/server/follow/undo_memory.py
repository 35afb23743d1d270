"""What all followed versions of a server keep to go back, within a bound of bytes."""

from __future__ import annotations

import threading
from collections import deque

from tessera.serving.server.follow.followed_model import UndoRecord


class UndoRecords:
    """Commits of one version that can be taken back, the oldest first; see `UndoMemory`."""

    def __init__(self) -> None:
        self.commits: deque[UndoRecord] = deque()


class UndoMemory:
    """Drops the oldest of all records where there are more bytes than allowed; any thread.

    Args:
        limit: bytes of all records together; 0: none is kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._held = 0
        # Each version's records are here in their order, so the oldest of all is the oldest of its version.
        self._order: deque[UndoRecords] = deque()

    def keep(self, records: UndoRecords, record: UndoRecord) -> None:
        """A commit was put in; it can be taken back until the room of ``record`` is needed."""
        with self._lock:
            records.commits.append(record)
            self._order.append(records)
            self._held += record.bytes
            while self._held > self._limit:
                self._held -= self._order.popleft().commits.popleft().bytes

    def newest(self, records: UndoRecords, count: int) -> list[UndoRecord] | None:
        """The ``count`` newest records, the newest first; None: some were dropped."""
        with self._lock:
            if len(records.commits) < count:
                return None
            return [records.commits[-1 - place] for place in range(count)]

    def forget(self, records: UndoRecords, count: int | None = None) -> None:
        """Let go of the ``count`` newest records, or of all."""
        with self._lock:
            there = len(records.commits)
            for _ in range(there if count is None else min(count, there)):
                self._held -= records.commits.pop().bytes
                # The last of this version's entries stands for its newest record.
                place = len(self._order) - 1
                while self._order[place] is not records:
                    place -= 1
                del self._order[place]

    @property
    def held(self) -> int:
        """Bytes of all records."""
        return self._held
