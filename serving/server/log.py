"""Structured log lines on stderr: one JSON object per line, or aligned text for a terminal.

The logger is made per server and handed down; nothing is configured globally, so that two
servers in one process (as in the tests) do not share settings.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, TextIO

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["json", "text"]


def make_logger(level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> Any:
    """A logger with ``debug``, ``info``, ``warning`` and ``error`` (event, **fields).

    Args:
        level: lines below it are not written.
        log_format: ``json`` or ``text``.
        stream: where to write; stderr if None.
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
    return structlog.wrap_logger(
        structlog.PrintLogger(stream or sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
    )
