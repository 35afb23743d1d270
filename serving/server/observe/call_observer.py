"""What is told of single calls for scores: a line of the access log of each, spans of some, and their requests.

Whether a call is traced is decided before it is computed, so that how it went makes no difference: a traceparent says it
by its sampled flag; a share of the calls without one begins a trace of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tessera
from tessera.serving.server.config import ServerConfig
from tessera.serving.server.observe.access_log import AccessLog, open_access_log
from tessera.serving.server.observe.call_record import CallRecord
from tessera.serving.server.observe.collector import read_collector
from tessera.serving.server.observe.collector_client import CollectorClient
from tessera.serving.server.observe.origin import CallOrigin, GrpcOrigins, RestOrigins, Sampler
from tessera.serving.server.observe.record_files import RecordOptions
from tessera.serving.server.observe.record_format import RecordedCall
from tessera.serving.server.observe.request_recorder import RequestRecorder
from tessera.serving.server.observe.span_exporter import SpanExporter
from tessera.serving.server.security.secret_file import warn_if_readable


class CallObserver:
    """Tells of calls; used on the event loop's thread alone.

    Args:
        config: of the server.
        log: told when spans cannot be sent.

    Raises:
        UserError: the access log cannot be opened, a file of the collector's cannot be used, or the folder of
            recorded requests not be written to.
    """

    def __init__(self, config: ServerConfig, log: Any) -> None:
        self._lines: AccessLog | None = open_access_log(config.access_log)
        self._sampler = Sampler(config.trace_share) if config.otlp_endpoint else None
        self._spans = _exporter(config, log)
        options = RecordOptions(
            config.record, config.record_share, config.record_file_bytes, config.record_bytes
        )
        self._recorder = RequestRecorder(options, log) if config.record else None

    @property
    def active(self) -> bool:
        """Whether any call is told of."""
        told = (self._lines, self._spans, self._recorder)
        return any(each is not None for each in told)

    @property
    def has_file(self) -> bool:
        """Whether there is a file that can be opened again."""
        return self._lines is not None and self._lines.has_file

    def grpc_origins(self, secret: str) -> GrpcOrigins | None:
        """What reads the origins of gRPC calls that show ``secret`` where they are forwarded; None: nobody asks."""
        if not self.active:
            return None
        return GrpcOrigins(
            secret,
            sampler=self._sampler,
            logged=self._lines is not None,
            recorded=self._recorder is not None,
        )

    def rest_origins(self, *, forwards: bool = False) -> RestOrigins | None:
        """What reads the origins of requests over HTTP; None: nobody asks.

        Args:
            forwards: the calls are forwarded to processes that decide which are traced.
        """
        if not self.active:
            return None
        return RestOrigins(
            sampler=self._sampler,
            logged=self._lines is not None,
            recorded=self._recorder is not None,
            forwards=forwards,
        )

    def sampled(self, origin: CallOrigin) -> CallOrigin:
        """``origin`` of a call that was not forwarded in the end."""
        if self._sampler is None:
            return origin
        return dataclasses.replace(origin, trace_id=self._sampler.trace_id(origin.parent))

    def record(
        self,
        origin: CallOrigin,
        method: str,
        model: tuple[str, str],
        arrival: float,
        message: bytes,
    ) -> None:
        """Record a request, if it is one of the share.

        Args:
            origin: where the call comes from.
            method: ``Predict`` or ``ModelInfer``.
            model: name and version of the model that it goes to.
            arrival: when its message was there, seconds of ``time.monotonic``.
            message: as it was received.
        """
        if self._recorder is None or not self._recorder.draws():
            return
        call = RecordedCall(0, method, origin.protocol, *model, origin.request_id, message)
        self._recorder.put(arrival, call)

    def tell(self, record: CallRecord) -> None:
        """Tell of a call that has just ended."""
        if self._lines is not None:
            self._lines.write(record)
        if self._spans is not None and record.origin.trace_id:
            self._spans.put(record)

    def dropped_lines(self) -> int:
        """Lines of the access log that found no room or could not be written."""
        return 0 if self._lines is None else self._lines.dropped()

    def spans(self) -> dict[str, int]:
        """How many spans were sent and dropped so far."""
        exporter = self._spans
        if exporter is None:
            return {"sent": 0, "dropped": 0}
        return {"sent": exporter.sent, "dropped": exporter.dropped}

    def records(self) -> Mapping[str, int]:
        """How many requests were recorded (``written``) and ``dropped`` so far, and the ``bytes`` of the former."""
        if self._recorder is None:
            return {"written": 0, "dropped": 0, "bytes": 0}
        return self._recorder.counts()

    def reopen(self, log: Any) -> None:
        """Go on with the file that has the access log's path now, and tell ``log``."""
        if self._lines is not None:
            self._lines.reopen(log)

    def close(self) -> None:
        """Tell no more; wait at most three seconds until what there is to tell has been told."""
        if self._spans is not None:
            self._spans.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._lines is not None:
            self._lines.close()


def _exporter(config: ServerConfig, log: Any) -> SpanExporter | None:
    if not config.otlp_endpoint:
        return None
    client = CollectorClient(
        read_collector(config.otlp_endpoint), config.otlp_ca, config.otlp_headers_file
    )
    if config.otlp_headers_file:
        warn_if_readable(config.otlp_headers_file, log)
    return SpanExporter(client, tessera.__version__, log)
