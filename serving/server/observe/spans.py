"""A traced call as spans of OpenTelemetry, in OTLP's JSON: a server span and, of an answered call, one for each stage.

docs/observe.md has names and attributes; ``cpp_server/src/observe/spans.h`` writes the same ones and says how the times of
stages are laid out, and why the protocol is OTLP over HTTP in JSON: it is stable, and needs neither a library nor
generated code.  OpenTelemetry's SDK would bring its own context, queue and threads for six spans that are all known when
a call has ended.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from tessera.serving.server.errors import Code
from tessera.serving.server.observe.call_record import CallRecord, CallStages

Span = dict[str, Any]

_INTERNAL, _SERVER, _ERROR = 1, 2, 2
"""OTLP's numbers of kinds of spans, and of a status."""

_SERVICES = {
    "Predict": "predictor.Predictor",
    "ModelInfer": "inference.GRPCInferenceService",
}

_GRPC_NUMBERS = {
    Code.OK: 0,
    Code.CANCELLED: 1,
    Code.INVALID_ARGUMENT: 3,
    Code.DEADLINE_EXCEEDED: 4,
    Code.NOT_FOUND: 5,
    Code.RESOURCE_EXHAUSTED: 8,
    Code.INTERNAL: 13,
    Code.UNAVAILABLE: 14,
}

_ERRORS = {Code.DEADLINE_EXCEEDED, Code.INTERNAL, Code.UNAVAILABLE}
"""The codes that are the server's fault, by the conventions for spans of servers."""

_STAGES = ("decode", "queue", "assemble", "transfer", "forward")
"""Before ``encode``, in their order; copying to the device has no span of its own."""


def spans_of(record: CallRecord, ended_ns: int) -> list[Span]:
    """The spans of ``record``, a traced call that ended ``ended_ns`` nanoseconds after 1970; the server span first."""
    began_ns = ended_ns - round(record.seconds * 1e9)
    origin = record.origin
    server = _span(origin.trace_id, os.urandom(8).hex(), began_ns, ended_ns)
    if origin.parent is not None:
        server["parentSpanId"] = origin.parent.span_id
    service = _SERVICES[record.method]
    if origin.protocol == "rest":
        server["name"] = f"POST {origin.route}"
        about: dict[str, str | int] = {
            "http.request.method": "POST",
            "http.route": origin.route,
            "http.response.status_code": record.http_status,
        }
    else:
        server["name"] = f"{service}/{record.method}"
        about = {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": record.method,
            "rpc.grpc.status_code": _GRPC_NUMBERS[record.code],
        }
    if origin.peer:
        about["network.peer.address"] = origin.peer
    about["tessera.model"] = record.model
    about["tessera.version"] = record.version
    about["tessera.samples"] = record.samples
    about["tessera.ids"] = record.ids
    about["tessera.code"] = record.code.value
    about["tessera.request_id"] = origin.request_id
    server["kind"] = _SERVER
    server["attributes"] = _attributes(about)
    if record.code in _ERRORS:
        server["status"] = {"code": _ERROR}
    if record.stages is None:
        return [server]
    return [server, *_stage_spans(server, record.stages, began_ns, ended_ns)]


def export_request(server_version: str, spans: list[Span]) -> dict[str, Any]:
    """What a collector is sent: ``spans`` of this server, of this version, on this host.

    ``OTEL_SERVICE_NAME`` of the environment names another service than ``tessera``.
    """
    resource: dict[str, str | int] = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME") or "tessera",
        "service.version": server_version,
        "host.name": socket.gethostname(),
        "tessera.server": "python",
        "process.pid": os.getpid(),
    }
    scope = {"name": "tessera", "version": server_version}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": spans}],
            }
        ]
    }


def _stage_spans(server: Span, stages: CallStages, began_ns: int, ended_ns: int) -> list[Span]:
    encode_ns = max(began_ns, ended_ns - round(stages.encode * 1e9))
    spans = []

    def add(name: str, begin_ns: int, end_ns: int) -> None:
        span = _span(server["traceId"], os.urandom(8).hex(), begin_ns, end_ns)
        batch = {
            "tessera.batch_requests": stages.batch_requests,
            "tessera.batch_samples": stages.batch_samples,
        }
        span["parentSpanId"] = server["spanId"]
        span["name"] = name
        span["kind"] = _INTERNAL
        span["attributes"] = _attributes(batch if name == "forward" else {})
        spans.append(span)

    at_ns = began_ns
    for name in _STAGES:
        end_ns = min(at_ns + round(getattr(stages, name) * 1e9), encode_ns)
        if name != "transfer":
            add(name, at_ns, end_ns)
        at_ns = end_ns
    add("encode", encode_ns, ended_ns)
    return spans


def _span(trace_id: str, span_id: str, begin_ns: int, end_ns: int) -> Span:
    return {
        "traceId": trace_id,
        "spanId": span_id,
        "startTimeUnixNano": str(begin_ns),
        "endTimeUnixNano": str(end_ns),
    }


def _attributes(about: dict[str, str | int] | dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in about.items()
    ]
