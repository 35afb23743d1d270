"""Structured log lines: one JSON object per line, or aligned text for a terminal.

The logger is made per server and handed down; nothing is configured globally, so that two
servers in one process (as in the tests) do not share settings.

A line that a client can cause as often as it likes is logged with ``limited=True``: of those with the
same event, `LINES_PER_SECOND` are written in a second, and then one that tells how many were not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from io import TextIOBase
from typing import Any, Literal, TextIO, cast

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "text"]

LINES_PER_SECOND = 10


def make_logger(level: LogLevel, log_format: LogFormat, stream: TextIOBase) -> Any:
    """A logger with ``debug``, ``info``, ``warning`` and ``error`` (event, **fields).

    Args:
        level: lines below it are not written.
        log_format: ``json`` or ``text``.
        stream: where to write, one ``write`` a line; a `LogWriter` in a program that serves.
    """
    renderers: list[Any]
    if log_format == "json":
        # Without the frames' variables: they hold what users sent.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        renderers = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    else:
        renderers = [
            structlog.dev.ConsoleRenderer(
                colors=False, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    limit = LineLimit(
        time.monotonic,
        _after,
        lambda event, lines: log.warning("suppressed", suppressed=event, lines=lines),
    )
    log: Any = structlog.wrap_logger(
        structlog.WriteLogger(cast("TextIO", stream)),
        processors=[
            limit,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
    return log


def log_unhandled(log: Any, context: Mapping[str, Any]) -> None:
    """Tell ``log`` an error that belongs to no call, as an event loop tells it."""
    error = context.get("exception")
    log.error("unhandled", message=context["message"], exc_info=error, limited=True)


class LineLimit:
    """The processor of structlog's that lets so many lines of an event through in a second.

    May be used by several threads.

    Args:
        clock: seconds, monotonic.
        after: calls a function after so many seconds, on whatever thread.
        tell: called with an event and the number of its lines that were suppressed in a second.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        after: Callable[[float, Callable[[], None]], None],
        tell: Callable[[str, int], None],
    ) -> None:
        self._clock = clock
        self._after = after
        self._tell = tell
        self._lock = threading.Lock()
        self._seconds: dict[str, _Second] = {}

    def __call__(
        self, _logger: Any, _method: str, line: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Give ``line`` back, or raise what tells structlog to drop it."""
        if line.pop("limited", False) and not self._admit(line["event"]):
            raise structlog.DropEvent
        return line

    def _admit(self, event: str) -> bool:
        now = self._clock()
        with self._lock:
            second = self._seconds.get(event)
            if second is None or now - second.began >= 1.0:
                second = self._seconds[event] = _Second(now)
            second.lines += 1
            first_suppressed = second.lines == LINES_PER_SECOND + 1
        if first_suppressed:
            left_s = second.began + 1.0 - now
            self._after(left_s, lambda: self._tell(event, second.lines - LINES_PER_SECOND))
        return second.lines <= LINES_PER_SECOND


class _Second:
    """The lines of one event in the second that began at ``began``."""

    __slots__ = ("began", "lines")

    def __init__(self, began: float) -> None:
        self.began = began
        self.lines = 0


def _after(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
