"""When a call may be sent again, and how long to wait before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tessera.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Repeat calls that ended with UNAVAILABLE, and only those.

    UNAVAILABLE means that the server did not take the request (it is starting, draining or
    unreachable), so repeating cannot do the work twice.  RESOURCE_EXHAUSTED is left to the
    caller: repeating into a full queue keeps it full.

    The wait before attempt ``n + 1`` is drawn uniformly from the upper half of
    ``min(max_backoff_s, first_backoff_s * 2 ** (n - 1))``, so that clients which failed
    together do not come back together.  All attempts share the call's one time limit.

    Attributes:
        attempts: sends in all, the first included; at least 1.
        first_backoff_s: the longest wait before the second attempt, in seconds.
        max_backoff_s: the longest wait before any attempt, in seconds.

    Raises:
        UserError: a value is out of range.
    """

    attempts: int = 4
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UserError(f"retry: attempts is {self.attempts}; it must be at least 1")
        if not 0 < self.first_backoff_s <= self.max_backoff_s:
            raise UserError(
                f"retry: first_backoff_s is {self.first_backoff_s} and max_backoff_s"
                f" {self.max_backoff_s}; 0 < first_backoff_s <= max_backoff_s must hold"
            )

    def waits_s(self, rng: random.Random) -> Iterator[float]:
        """The seconds to wait before the second, third ... last attempt."""
        ceiling_s = self.first_backoff_s
        for _ in range(self.attempts - 1):
            yield ceiling_s * rng.uniform(0.5, 1.0)
            ceiling_s = min(self.max_backoff_s, 2 * ceiling_s)
