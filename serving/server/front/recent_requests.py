"""A few of the last requests of each model, with which a version that comes is called before it answers.

What nobody has asked yet is slow the first time.  Every `ONE_IN`-th request is kept as it was parsed, without a
copy; nothing of it leaves the process.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.serving.server.errors import ServeError
from tessera.serving.server.model.served_model import ServedModel
from tessera.serving.server.request.decoded_request import DecodedRequest

ONE_IN = 64
KEPT = 16
"""So many requests of one model stay."""
MOST_BYTES = 64 * 1024
"""A larger request is not kept."""
ALL_BYTES = 16 * 1024 * 1024
"""The requests of all models together have at most so many bytes."""

_LOWEST_PRIORITY = -(1 << 31)
_PATIENCE_S = 3.0
_PAUSES = 2
"""Between two requests, in times of what the one before has taken: those who wait for answers come first."""

DecodeFor = Callable[[ServedModel], DecodedRequest]
"""See `DecodedCall.decode_for`."""


class RecentRequests:
    """Owned by the event loop's thread."""

    def __init__(self) -> None:
        self._calls = 0
        self._bytes = 0
        self._models: dict[str, deque[tuple[int, DecodeFor]]] = {}

    def note(self, model: str, decode_for: DecodeFor, size: int) -> None:
        """A request of ``size`` bytes goes to ``model``; keep it if it is one of those that are kept."""
        self._calls += 1
        if self._calls % ONE_IN != 1 or size > MOST_BYTES:
            return
        kept = self._models.setdefault(model, deque())
        if len(kept) == KEPT:
            self._bytes -= kept.popleft()[0]
        if self._bytes + size <= ALL_BYTES:
            kept.append((size, decode_for))
            self._bytes += size

    def of(self, model: str) -> list[DecodeFor]:
        """The last requests to ``model``."""
        return [decode_for for _, decode_for in self._models.get(model, ())]

    def forget(self, model: str) -> None:
        """There is no such model any more."""
        self._bytes -= sum(size for size, _ in self._models.pop(model, ()))


@dataclass
class WarmUpCounts:
    """What came of the requests that a version was called with before it answers.

    Attributes:
        answered: it has computed them.
        unfit: its features, or their values, are others.
        failed: it could not compute them, or not in time.
    """

    answered: int = 0
    unfit: int = 0
    failed: int = 0


async def warm_up_with(sample: Sequence[DecodeFor], model: ServedModel) -> WarmUpCounts:
    """Let ``model``, which answers nobody yet, compute ``sample``, one request after the other, with pauses.

    Its scores are thrown away.  It takes a few seconds at most.
    """
    counts = WarmUpCounts()
    end = time.monotonic() + _PATIENCE_S
    for decode_for in sample:
        began = time.monotonic()
        if began >= end:
            break
        try:
            request = decode_for(model)
        except ServeError:
            counts.unfit += 1
            continue
        try:
            await asyncio.wait_for(
                model.scheduler.submit(request, priority=_LOWEST_PRIORITY, deadline=end),
                end - began,
            )
            counts.answered += 1
        except (ServeError, asyncio.TimeoutError):
            counts.failed += 1
        await asyncio.sleep(max(0.0, min(_PAUSES * (time.monotonic() - began), end - began)))
    return counts
