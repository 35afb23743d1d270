"""Spans on their way to a collector: a bounded queue and one thread, which sends what has come in a second.

What becomes of a request to the collector, and how long the pauses between failures are, is as
``cpp_server/src/observe/span_exporter.h`` says.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import Any

from tessera.serving.server.named_thread import NamedThread
from tessera.serving.server.observe.call_record import CallRecord
from tessera.serving.server.observe.collector_client import (
    CollectorAnswer,
    CollectorClient,
    NoAnswerError,
)
from tessera.serving.server.observe.spans import export_request, spans_of

MOST_CALLS = 2_048
"""Calls whose spans may wait."""

REQUEST_CALLS = 512
"""Calls whose spans are sent at once."""

TRIES = 5
_GATHER_S = 1.0
_ANSWER_LIMIT_S = 5.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FLUSH_LIMIT_S = 1.0

_TRY_AGAIN = {429, 502, 503, 504}

_SERVER_SPAN, _ANSWERED_SPANS = 1, 6


class SpanExporter:
    """Sends spans; ``put`` may be called by any thread, and neither blocks nor fails.

    Args:
        collector: where they go.
        server_version: of the resource.
        log: told when sending begins to fail, and when it works again.

    Attributes:
        sent: spans that the collector has taken.
        dropped: spans that found no room, or that the collector did not take.
    """

    def __init__(self, collector: CollectorClient, server_version: str, log: Any) -> None:
        self.sent = 0
        self.dropped = 0
        self._collector = collector
        self._server_version = server_version
        self._log = log
        self._changed = threading.Condition()
        self._calls: deque[tuple[CallRecord, int]] = deque()
        self._closed = False
        self._until = float("inf")  # of everything, once it is closed
        self._failures = 0  # since the last success
        self._resume = 0.0
        self._thread: threading.Thread | None = None

    def put(self, record: CallRecord) -> None:
        """Send the spans of a traced call that has just ended."""
        with self._changed:
            if self._closed or len(self._calls) >= MOST_CALLS:
                self.dropped += _SERVER_SPAN if record.stages is None else _ANSWERED_SPANS
                return
            self._calls.append((record, time.time_ns()))
            if len(self._calls) in {1, REQUEST_CALLS}:
                self._changed.notify_all()
            if self._thread is None:
                self._thread = NamedThread(target=self._run, name="span-exporter", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Take no more spans; try once to send those that wait, for a second at most."""
        with self._changed:
            if not self._closed:
                self._closed = True
                self._until = time.monotonic() + _FLUSH_LIMIT_S
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(max(0.0, self._until - time.monotonic()))

    def _run(self) -> None:
        while calls := self._take():
            spans = [span for record, ended_ns in calls for span in spans_of(record, ended_ns)]
            refused = min(self._deliver(spans), len(spans))
            with self._changed:
                self.sent += len(spans) - refused
                self.dropped += refused

    def _take(self) -> list[tuple[CallRecord, int]]:
        """The calls of the next request; none: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closed)
            full = lambda: self._closed or len(self._calls) >= REQUEST_CALLS  # noqa: E731 - it is one line
            self._changed.wait_for(full, _GATHER_S)
            return [self._calls.popleft() for _ in range(min(len(self._calls), REQUEST_CALLS))]

    def _deliver(self, spans: list[dict[str, Any]]) -> int:
        """Returns how many of ``spans`` were not taken in the end."""
        body = json.dumps(export_request(self._server_version, spans)).encode()
        for tries in range(1, TRIES + 1):
            last = not self._rest() or tries == TRIES
            try:
                left = min(_ANSWER_LIMIT_S, self._until - time.monotonic())
                if left <= 0:
                    return len(spans)
                answer = self._collector.post(body, left)
            except NoAnswerError as error:
                self._failed(str(error), 0)
            else:
                if answer.status // 100 == 2:
                    self._succeeded()
                    return _refused_spans(answer)
                self._failed(f"it answered with status {answer.status}", answer.retry_after_s)
                last = last or answer.status not in _TRY_AGAIN
            if last:
                break
        return len(spans)

    def _rest(self) -> bool:
        """Wait for the end of the pause that failures have asked for; returns whether the server goes on."""
        with self._changed:
            left = self._resume - time.monotonic()
            self._changed.wait_for(lambda: self._closed, max(0.0, left))
            return not self._closed

    def _failed(self, error: str, retry_after_s: int) -> None:
        self._failures += 1
        self._resume = time.monotonic() + pause_after(self._failures, retry_after_s)
        if self._failures == 1:
            self._log.warning("spans_not_sent", collector=self._collector.url, error=error)

    def _succeeded(self) -> None:
        if self._failures > 0:
            self._log.info("spans_sent_again", collector=self._collector.url)
        self._failures = 0


def pause_after(failures: int, retry_after_s: int) -> float:
    """Seconds to the next request after ``failures`` (1 or more) in a row, the last of which asked for ``retry_after_s``."""
    doubled = _FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10)
    return min(max(doubled, float(retry_after_s)), _LONGEST_PAUSE_S)


def _refused_spans(answer: CollectorAnswer) -> int:
    """How many spans a collector that took a request says that it has refused; OTLP writes the number as text."""
    try:
        told = json.loads(answer.body)
        return max(0, int(told["partialSuccess"]["rejectedSpans"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0
