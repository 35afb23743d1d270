"""Who is serving: the state behind ``grpc.health.v1.Health``, without gRPC.

The empty name is the server as a whole; every model has its own name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from enum import Enum


class Serving(Enum):
    """The states that the health protocol knows."""

    SERVING = "SERVING"
    NOT_SERVING = "NOT_SERVING"
    SERVICE_UNKNOWN = "SERVICE_UNKNOWN"


class HealthService:
    """The state per name, and a way to watch it.

    Args:
        names: everything that can be asked for from the beginning, besides the empty name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._states = dict.fromkeys(("", *names), Serving.NOT_SERVING)
        self._stopped = False
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, name: str, state: Serving) -> None:
        """``name``, which is known from now on, has this state until `stop_serving`."""
        if not self._stopped and self._states.get(name) is not state:
            self._states[name] = state
            self._wake()

    def remove(self, name: str) -> None:
        """``name`` is unknown from now on."""
        if self._states.pop(name, None) is not None:
            self._wake()

    def stop_serving(self) -> None:
        """Everything is NOT_SERVING from now on."""
        self._stopped = True
        for name in self._states:
            self._states[name] = Serving.NOT_SERVING
        self._wake()

    def close(self) -> None:
        """End every watch, so that an open one does not hold the server up."""
        self._closed = True
        self._wake()

    def check(self, name: str) -> Serving | None:
        """The state of ``name``; None when it is unknown."""
        return self._states.get(name)

    async def watch(self, name: str) -> AsyncIterator[Serving]:
        """The state now and after every change, until `close`."""
        last: Serving | None = None
        while True:
            state = self._states.get(name, Serving.SERVICE_UNKNOWN)
            if state is not last:
                last = state
                yield state
                continue
            if self._closed:
                return
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
