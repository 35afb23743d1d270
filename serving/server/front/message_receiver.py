"""Bounds what messages hold that are still being received.

gRPC takes a message in, however long, once it is asked for; of one that nobody has asked for, it
takes a window of `WINDOW_BYTES`.  So no more messages are asked for at once than fit the bound if
each is as large as a message may be, and the others wait for their turn.  Connections take turns, each
with its oldest message first.  Where too many wait, the connection with the most of them loses its newest.

A message that is not complete `_SLOW_S` after it was asked for is slow.  At most half of those
asked for may be slow.  Where more are, the surplus is refused: first the slow messages that have
taken longer than ``patience_s``, the longest first, then those that were asked for last.  So a
client that stalls does not keep others out for long, and never keeps out small messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tessera.serving.server.errors import QueueFullError

WINDOW_BYTES = 64 * 1024

_CALL_BYTES = 16 * 1024
_SLOW_S = 0.05
_LOOK_S = 0.025
_PATIENCE_S = 10.0

_Message = TypeVar("_Message")


class _WaitingTurns:
    """Futures of messages that wait for their turn, by connection."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}  # the next connection first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, connection: str) -> int:
        """How many messages of ``connection`` wait."""
        return len(self._queues.get(connection, ()))

    def largest(self) -> str:
        """The connection with the most messages; there must be one."""
        return max(self._queues, key=self.of)

    def add(self, connection: str) -> asyncio.Future[None]:
        """A new turn, the last of ``connection``."""
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(connection, deque()).append(turn)
        self._count += 1
        return turn

    def discard(self, connection: str, turn: asyncio.Future[None]) -> None:
        """Take ``turn`` out if it is in."""
        queue = self._queues.get(connection, deque())
        with contextlib.suppress(ValueError):
            queue.remove(turn)
            self._taken(connection, queue)

    def newest(self, connection: str) -> asyncio.Future[None]:
        """Take out the last turn of ``connection``, which must have one."""
        queue = self._queues[connection]
        turn = queue.pop()
        self._taken(connection, queue)
        return turn

    def next(self) -> asyncio.Future[None]:
        """Take out the oldest turn of the next connection; there must be one."""
        connection, queue = next(iter(self._queues.items()))
        turn = queue.popleft()
        del self._queues[connection]
        self._queues[connection] = queue
        self._taken(connection, queue)
        return turn

    def _taken(self, connection: str, queue: deque[asyncio.Future[None]]) -> None:
        self._count -= 1
        if not queue:
            del self._queues[connection]


class MessageReceiver:
    """Receives messages in turn; used on the event loop's thread alone.

    Args:
        max_bytes: what messages may hold that have been asked for; those that wait for it may hold half
            as much.
        max_message_bytes: the largest message.
        patience_s: seconds after which a slow message is refused first.
    """

    def __init__(
        self, *, max_bytes: int, max_message_bytes: int, patience_s: float = _PATIENCE_S
    ) -> None:
        self._free = max(2, max_bytes // max_message_bytes)
        self._max_slow = self._free // 2
        self._max_waiting = max(1, max_bytes // 2 // (WINDOW_BYTES + _CALL_BYTES))
        self._patience_s = patience_s
        self._waiting = _WaitingTurns()
        self._asked: dict[asyncio.Task[Any], float] = {}  # since when, the longest first
        self._refused: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def receive(self, read: Callable[[], Awaitable[_Message]], connection: str) -> _Message:
        """Wait for the calling task's turn, then return what ``read()`` gives.

        Args:
            read: receives the message; called once.
            connection: names the client's connection.

        Raises:
            QueueFullError: too many messages are being received.
        """
        if self._free:
            self._free -= 1
        else:
            await self._turn(connection)
        task = asyncio.current_task()
        assert task is not None
        self._asked[task] = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        try:
            return await read()
        except asyncio.CancelledError:
            if task not in self._refused:
                raise
            raise QueueFullError(
                "the server is full: the message has not come whole, and too many others are "
                "arriving; try again later"
            ) from None
        finally:
            self._refused.discard(task)
            del self._asked[task]
            self._pass_on()

    async def _turn(self, connection: str) -> None:
        waiting = self._waiting
        if len(waiting) >= self._max_waiting:
            largest = waiting.largest()
            full = QueueFullError(
                f"the server is full: {len(waiting)} messages wait to be read, "
                f"{waiting.of(largest)} of them on this connection; try again later"
            )
            if waiting.of(connection) >= waiting.of(largest):
                raise full
            refused = waiting.newest(largest)
            if not refused.done():
                refused.set_exception(full)
        turn = waiting.add(connection)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                waiting.discard(connection, turn)
            elif turn.exception() is None:
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            turn = self._waiting.next()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _look(self) -> None:
        self._timer = None
        if not self._asked:
            return
        now = time.monotonic()
        slow = [
            (since, task)
            for task, since in self._asked.items()
            if since <= now - _SLOW_S and task not in self._refused
        ]
        surplus = len(slow) - self._max_slow
        if surplus > 0:
            stalled = sum(since <= now - self._patience_s for since, _ in slow)
            first = min(stalled, surplus)
            for _, task in slow[:first] + slow[len(slow) - (surplus - first) :]:
                self._refused.add(task)
                task.cancel()
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
