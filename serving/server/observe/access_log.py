"""The access log: one JSON line for each call that `tessera_requests_total` counts.

docs/observe.md has the fields; ``cpp_server/src/observe`` writes the same ones.  Lines go through a `LogWriter`: what finds
no room or cannot be written is dropped and counted, and costs no call any time.  Several processes append to one
file, each whole lines.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from typing import Any

from tessera.errors import UserError
from tessera.serving.server.log_writer import LogWriter
from tessera.serving.server.observe.call_record import CallRecord

STANDARD_OUTPUT = "-"

_MODE = 0o640
"""Lines tell who asked for what: not for everybody."""


class AccessLog:
    """Writes the lines; used on the event loop's thread alone.

    Args:
        path: a file that lines are appended to, made where there is none; ``-``: the standard output.

    Raises:
        UserError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = _open(path)
        self._writer = LogWriter(self._descriptor, name="access-log")
        self._closed = False

    def dropped(self) -> int:
        """Lines that found no room or could not be written."""
        return self._writer.dropped

    @property
    def has_file(self) -> bool:
        """Whether there is a file that can be opened again."""
        return self._path != STANDARD_OUTPUT

    def write(self, record: CallRecord) -> None:
        """Put the line of a call that has just ended."""
        self._writer.write(access_line(record, datetime.now(timezone.utc)))

    def reopen(self, log: Any) -> None:
        """Go on with the file that has the path now, and tell ``log``; where there can be none, with the one so far."""
        if not self.has_file:
            return
        try:
            fresh = _open(self._path)
        except UserError as error:
            log.warning("access_log_not_reopened", error=str(error))
            return
        # In one step, between two writes of the writer's thread.
        os.dup2(fresh, self._descriptor, inheritable=False)
        os.close(fresh)
        log.info("access_log_reopened")

    def close(self) -> None:
        """Take no more lines; wait at most a second until those that wait are written."""
        if not self._closed and self._writer.end():
            self._closed = True
            os.close(self._descriptor)


def open_access_log(path: str) -> AccessLog | None:
    """The log of ``--access-log``; None: there is none.

    Raises:
        UserError: it cannot be opened.
    """
    return AccessLog(path) if path else None


def check_access_log(path: str) -> None:
    """Refuse a log that cannot be opened.

    Raises:
        UserError: it cannot.
    """
    if path:
        os.close(_open(path))


def access_line(record: CallRecord, now: datetime) -> str:
    """The line of ``record``, with its newline, of a call that ended at ``now``, which is in UTC."""
    origin = record.origin
    told: dict[str, Any] = {
        "time": now.strftime("%Y-%m-%dT%H:%M:%S.") + f"{now.microsecond // 1000:03d}Z",
        "protocol": origin.protocol,
        "method": record.method,
        "peer": origin.peer,
        "model": record.model,
        "version": record.version,
        "samples": record.samples,
        "ids": record.ids,
        "code": record.code.value,
    }
    if origin.protocol == "rest":
        told["http_status"] = record.http_status
    told["duration_ms"] = _ms(record.seconds)
    if record.stages is not None:
        told["queue_ms"] = _ms(record.stages.queue)
        told["forward_ms"] = _ms(record.stages.forward)
    told["request_id"] = origin.request_id
    trace_id = origin.trace_id or (origin.parent.trace_id if origin.parent else "")
    if trace_id:
        told["trace_id"] = trace_id
    return json.dumps(told, separators=(",", ":")) + "\n"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _open(path: str) -> int:
    try:
        if path == STANDARD_OUTPUT:
            return os.dup(-1 if sys.__stdout__ is None else sys.__stdout__.fileno())
        # A pipe that nobody reads is refused rather than waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOCTTY | os.O_NONBLOCK
        return os.open(path, flags, _MODE)
    except OSError as error:
        raise UserError(
            f"the access log '{path}' cannot be opened ({error.strerror}); give --access-log another path"
        ) from None
