"""What a signal means to the server, from those that came before it."""

from __future__ import annotations

import signal
from enum import Enum

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_SAME_SIGNAL_SECONDS = 1.0
"""How long a repeat of the first signal is the same signal."""


class SignalMeaning(Enum):
    """What the server does about a signal."""

    DRAIN = "the first SIGTERM or SIGINT"
    REPEAT = "another one within a second: supervisors send to a process and to its group"
    END = "a later one"
    RELOAD = "SIGHUP"


class SignalReader:
    """Tells what each signal means; plain state without a clock of its own."""

    def __init__(self) -> None:
        self._first_stop: float | None = None

    def read(self, number: int, now: float) -> SignalMeaning:
        """What signal ``number`` means that came at ``now``, in seconds of a monotonic clock."""
        if number == signal.SIGHUP:
            return SignalMeaning.RELOAD
        if self._first_stop is None:
            self._first_stop = now
            return SignalMeaning.DRAIN
        return (
            SignalMeaning.REPEAT
            if now - self._first_stop < _SAME_SIGNAL_SECONDS
            else SignalMeaning.END
        )
