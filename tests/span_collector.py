"""A collector of spans for tests: takes OTLP over HTTP in JSON, with TLS or without, holds it against the protocol, and can misbehave."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.patience import PATIENCE_S

TAKEN = b"{}"


class SpanCollector:
    """Listens on a free port of 127.0.0.1 inside the ``with`` block.

    Args:
        script: what is answered first, each once: a status; a status and headers; bytes that are written as they are;
            None: nothing, until the block ends.  What comes then is taken.
        tls: an ``ssl.SSLContext`` that connections encrypt with; None: they do not.

    Attributes:
        spans: those that were taken, in the order in which they came; attributes as a dictionary.
        resources: the attributes of each request that was taken.
        requests: how many requests have come.
        headers: of each request that was taken.
        tls: as above; may be changed, for connections that follow.
    """

    def __init__(self, *script, tls=None):
        self.spans, self.resources, self.requests, self.headers = [], [], 0, []
        self.tls = tls
        self.wrong = []
        self._script = list(script)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                collector.answer(self)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def finish_request(self, request, client_address):
                with contextlib.suppress(OSError):  # a client that does not want this certificate
                    if collector.tls is not None:
                        request = collector.tls.wrap_socket(request, server_side=True)
                    super().finish_request(request, client_address)
                    request.close()

        self._server = Server(("127.0.0.1", 0), Handler)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        assert not self.wrong, self.wrong

    def answer(self, request):
        content = request.rfile.read(int(request.headers["Content-Length"]))
        with self._lock:
            self.requests += 1
            now = self._script.pop(0) if self._script else 200
        if now is None:
            self._ended.wait(PATIENCE_S)
            request.close_connection = True
            return
        if isinstance(now, bytes):
            request.wfile.write(now)
            request.close_connection = True
            return
        status, headers, body = now if isinstance(now, tuple) else (now, {}, TAKEN)
        if status == 200:
            try:
                self._take(request, json.loads(content))
            except Exception as error:  # noqa: BLE001 - told at the end of the block
                self.wrong.append(repr(error))
        with contextlib.suppress(OSError):
            request.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                request.send_header(name, value)
            request.end_headers()
            request.wfile.write(body)

    def _take(self, request, told):
        assert request.path == "/v1/traces"
        assert request.headers["Content-Type"] == "application/json"
        assert told.keys() == {"resourceSpans"}
        with self._lock:
            self.headers.append(dict(request.headers))
        for resource in told["resourceSpans"]:
            assert resource.keys() == {"resource", "scopeSpans"}
            spans = [span for scope in resource["scopeSpans"] for span in scope["spans"]]
            for span in spans:
                check_span(span)
            with self._lock:
                self.resources.append(dictionary(resource["resource"]["attributes"]))
                self.spans += [{**s, "attributes": dictionary(s["attributes"])} for s in spans]


def dictionary(attributes):
    """OTLP's list of keys and values; 64 bits travel as text."""
    found = {}
    for one in attributes:
        assert one.keys() == {"key", "value"}
        ((kind, value),) = one["value"].items()
        assert isinstance(value, str)
        found[one["key"]] = {"stringValue": str, "intValue": int}[kind](value)
    assert len(found) == len(attributes)
    return found


def check_span(span):
    """Hold ``span`` against OTLP's JSON."""
    known = {"traceId", "spanId", "parentSpanId", "name", "kind", "attributes", "status"}
    assert span.keys() <= known | {"startTimeUnixNano", "endTimeUnixNano"}
    for name, digits in (("traceId", 32), ("spanId", 16), ("parentSpanId", 16)):
        if name in span or name != "parentSpanId":
            assert len(span[name]) == digits
            assert int(span[name], 16) > 0
            assert span[name] == span[name].lower()
    assert 0 < int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    assert isinstance(span["startTimeUnixNano"], str)
    assert isinstance(span["endTimeUnixNano"], str)
    assert span["name"]
    assert span["kind"] in {1, 2}
