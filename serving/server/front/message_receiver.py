"""Bounds what messages hold that are still being received.

gRPC takes a message in, however long, once it is asked for; of one that nobody has asked for, it
takes a window of `WINDOW_BYTES`.  So no more messages are asked for at once than fit the bound if
each is as large as a message may be, and the others wait for their turn.  Connections take turns, each
with its oldest message first.  Prompt connections, whose last message came within `_PROMPT_S`, have three turns of
four while others wait, too, and the others never have more than two thirds of what may be asked for at once, so that
many clients that stall do not keep out those that do not.  Where too many wait, the connection with the most of them loses its newest, a prompt one only
where no other waits.

A message that is not complete `_SLOW_S` after it was asked for is slow.  At most half of those
asked for may be slow.  Where more are, the surplus is refused: first the slow messages that have
taken longer than ``patience_s``, the longest first, then those that were asked for last.  So a
client that stalls does not keep others out for long, and never keeps out small messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tessera.serving.server.errors import QueueFullError

WINDOW_BYTES = 64 * 1024

_CALL_BYTES = 16 * 1024
_SLOW_S = 0.05
_LOOK_S = 0.025
_PATIENCE_S = 10.0
_PROMPT_S = 1.0
_TURNS = 4
"""Every so many turns one is not a prompt connection's, if another waits."""
_KNOWN = 10_000

_Message = TypeVar("_Message")


class _Standing:
    """Which connections are prompt: those whose last message came soon, of the last `_KNOWN`."""

    def __init__(self) -> None:
        self._prompt: OrderedDict[str, None] = OrderedDict()

    def is_prompt(self, connection: str) -> bool:
        return connection in self._prompt

    def tell(self, connection: str, *, prompt: bool) -> None:
        """A message of ``connection`` has come whole soon enough, or it has not."""
        if not prompt:
            self._prompt.pop(connection, None)
            return
        self._prompt[connection] = None
        self._prompt.move_to_end(connection)
        if len(self._prompt) > _KNOWN:
            self._prompt.popitem(last=False)


class _WaitingTurns:
    """Futures of messages that wait for their turn, by connection."""

    def __init__(self, standing: _Standing) -> None:
        self._standing = standing
        self._queues: dict[str, deque[asyncio.Future[bool]]] = {}  # the next connection first
        self._count = 0
        self._taken_out = 0

    def __len__(self) -> int:
        return self._count

    def of(self, connection: str) -> int:
        """How many messages of ``connection`` wait."""
        return len(self._queues.get(connection, ()))

    def to_give_way(self) -> str:
        """The connection with the most messages, of those that are not prompt if there are any.

        There must be one.
        """
        others = [each for each in self._queues if not self._standing.is_prompt(each)]
        return max(others or self._queues, key=self.of)

    def add(self, connection: str) -> asyncio.Future[bool]:
        """A new turn, the last of ``connection``."""
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(connection, deque()).append(turn)
        self._count += 1
        return turn

    def discard(self, connection: str, turn: asyncio.Future[bool]) -> None:
        """Take ``turn`` out if it is in."""
        queue = self._queues.get(connection, deque())
        with contextlib.suppress(ValueError):
            queue.remove(turn)
            self._taken(connection, queue)

    def newest(self, connection: str) -> asyncio.Future[bool]:
        """Take out the last turn of ``connection``, which must have one."""
        queue = self._queues[connection]
        turn = queue.pop()
        self._taken(connection, queue)
        return turn

    def next(self, *, others_too: bool) -> tuple[asyncio.Future[bool], bool] | None:
        """Take out the oldest turn of the next connection.

        Args:
            others_too: whether it may be one that is not prompt.

        Returns:
            The turn, and whether its connection is prompt; None if there is none.
        """
        self._taken_out += 1
        prompt_first = not others_too or self._taken_out % _TURNS != 0
        standing = self._standing.is_prompt
        wanted = (each for each in self._queues if standing(each) is prompt_first)
        connection = next(wanted, None)
        if connection is None and others_too:
            connection = next(iter(self._queues), None)
        if connection is None:
            return None
        queue = self._queues.pop(connection)
        turn = queue.popleft()
        self._queues[connection] = queue
        self._taken(connection, queue)
        return turn, standing(connection)

    def _taken(self, connection: str, queue: deque[asyncio.Future[bool]]) -> None:
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
        self._for_others = self._free - self._free // 3
        self._max_waiting = max(1, max_bytes // 2 // (WINDOW_BYTES + _CALL_BYTES))
        self._patience_s = patience_s
        self._standing = _Standing()
        self._waiting = _WaitingTurns(self._standing)
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
        prompt = self._standing.is_prompt(connection)
        if self._free and (prompt or self._for_others):
            self._take(prompt=prompt)
        else:
            prompt = await self._turn(connection)
        task = asyncio.current_task()
        assert task is not None
        began = self._asked[task] = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        came = False
        try:
            content = await read()
            came = True
            return content  # noqa: TRY300 - `finally` is for both ways
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
            self._standing.tell(connection, prompt=came and time.monotonic() - began < _PROMPT_S)
            self._give_back(prompt=prompt)

    def _take(self, *, prompt: bool) -> None:
        self._free -= 1
        self._for_others -= not prompt

    def _give_back(self, *, prompt: bool) -> None:
        self._free += 1
        self._for_others += not prompt
        self._pass_on()

    async def _turn(self, connection: str) -> bool:
        """Wait for a turn, which is taken; returns whether it is taken as a prompt connection's."""
        waiting = self._waiting
        if len(waiting) >= self._max_waiting:
            last = waiting.to_give_way()
            full = QueueFullError(
                f"the server is full: {len(waiting)} messages wait to be read, "
                f"{waiting.of(last)} of them on this connection; try again later"
            )
            if not self._goes_before(connection, last):
                raise full
            refused = waiting.newest(last)
            if not refused.done():
                refused.set_exception(full)
        turn = waiting.add(connection)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                waiting.discard(connection, turn)
            elif turn.exception() is None:
                self._give_back(prompt=turn.result())
            raise

    def _goes_before(self, connection: str, last: str) -> bool:
        """Whether a new message of ``connection`` may take the place of one of ``last``."""
        prompt = self._standing.is_prompt(connection)
        if prompt is self._standing.is_prompt(last):
            return self._waiting.of(connection) < self._waiting.of(last)
        return prompt

    def _pass_on(self) -> None:
        while (
            self._free
            and (found := self._waiting.next(others_too=self._for_others > 0)) is not None
        ):
            turn, prompt = found
            if not turn.done():
                self._take(prompt=prompt)
                turn.set_result(prompt)

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
