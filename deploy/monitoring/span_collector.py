"""A collector of traces: takes OTLP over HTTP in JSON, as the servers send it, and keeps the spans."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_MOST_SPANS = 200_000


@dataclass(frozen=True)
class Span:
    """One span of a trace.

    Attributes:
        service: the resource that sent it, with its version.
        trace: the trace's id.
        name: what was done.
        begin_ns: since 1970, in nanoseconds.
        end_ns: the same.
        child: whether it is part of another span.
        attributes: of the span, as texts.
    """

    service: str
    trace: str
    name: str
    begin_ns: int
    end_ns: int
    child: bool
    attributes: dict[str, str]


def _texts(attributes: list[dict[str, Any]]) -> dict[str, str]:
    return {one["key"]: str(next(iter(one["value"].values()))) for one in attributes}


def read_spans(told: dict[str, Any]) -> Iterator[Span]:
    """The spans of one request."""
    for resource in told["resourceSpans"]:
        facts = _texts(resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    service=" ".join(facts[key] for key in sorted(facts)),
                    trace=span["traceId"],
                    name=span["name"],
                    begin_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    child="parentSpanId" in span,
                    attributes=_texts(span.get("attributes", [])),
                )


@contextmanager
def collecting() -> Iterator[tuple[str, list[Span]]]:
    """The address of a collector that runs, and the spans that it has taken so far."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            if len(spans) < _MOST_SPANS:
                spans.extend(read_spans(json.loads(content)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (http.server's name)
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
