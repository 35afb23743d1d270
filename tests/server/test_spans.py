"""Spans of traced calls: what they say, which calls are traced, and what a collector that misbehaves costs."""

import contextlib
import json
import socket
import threading
from collections import Counter
from pathlib import Path

import pytest

from tessera.errors import UserError
from tessera.serving.server.errors import Code
from tessera.serving.server.observe import span_exporter
from tessera.serving.server.observe.call_record import CallRecord, CallStages, refused_unread
from tessera.serving.server.observe.collector import parse_collector_headers, read_collector
from tessera.serving.server.observe.collector_client import CollectorClient, NoAnswerError
from tessera.serving.server.observe.origin import (
    CallOrigin,
    GrpcOrigins,
    RestOrigins,
    Sampler,
    TraceParent,
)
from tessera.serving.server.observe.span_exporter import MOST_CALLS, SpanExporter, pause_after
from tessera.serving.server.observe.spans import export_request, spans_of
from tests.server.test_log_writer import wait_until
from tests.span_collector import SpanCollector, dictionary

CASES = json.loads(Path(__file__).with_name("span_cases.json").read_text())
HEADER_CASES = json.loads(Path(__file__).with_name("collector_header_cases.json").read_text())
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-"
REFUSED = refused_unread(CallOrigin("grpc", "::1", "x", None, TRACE), "Predict", Code.OK, 0)


class Told:
    """A logger that keeps the events."""

    def __init__(self):
        self.events = []

    def info(self, event, **fields):
        self.events.append((event, fields))

    warning = info


@pytest.fixture
def quick(monkeypatch):
    """No pauses to speak of."""
    for name in ("_GATHER_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(span_exporter, name, 0.01)


def client_of(url, **files):
    return CollectorClient(read_collector(url), **files)


def record_of(call):
    parent = TraceParent(call["trace_id"], call["parent_id"], True) if call["parent_id"] else None
    named = ("protocol", "peer", "request_id", "trace_id", "route")
    origin = CallOrigin(**{name: call[name] for name in named}, parent=parent)
    timings = call["timings"]
    stages = timings and CallStages(
        **{name[:-3]: timings[name] / 1e6 for name in timings if name.endswith("_us")},
        batch_requests=timings["batch_requests"],
        batch_samples=timings["batch_samples"],
    )
    named = {name: call[name] for name in ("method", "model", "version", "samples", "ids")}
    return CallRecord(
        origin=origin,
        code=Code(call["code"]),
        http_status=call["http_status"],
        seconds=call["took_us"] / 1e6,
        stages=stages,
        **named,
    )


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["case"])
def test_spans_are_those_of_the_cases(case):
    # cpp_server/tests/spans_test.cc expects the same of the same calls.
    spans = spans_of(record_of(case["call"]), CASES["ended_ns"])
    server = spans[0]["spanId"]
    ids = {span.pop("spanId") for span in spans}
    assert len(ids) == len(spans)
    assert all(len(bytes.fromhex(each)) == 8 for each in ids)
    for span in spans[1:]:
        assert span.pop("parentSpanId") == server
        span["parentSpanId"] = "server"
    spans[0]["spanId"] = "server"
    assert spans == case["spans"]


def test_the_resource_is_this_server(monkeypatch):
    def attributes():
        (resource,) = export_request("9.9", [])["resourceSpans"]
        return dictionary(resource["resource"]["attributes"])

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert attributes()["service.name"] == "tessera"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ranking")
    assert (attributes()["service.name"], attributes()["service.version"]) == ("ranking", "9.9")
    assert attributes()["host.name"] == socket.gethostname()


def test_a_share_of_the_calls_without_a_trace_is_traced():
    for share, most in ((0.0, 0), (0.25, 433), (1.0, 0)):  # ten standard deviations
        traces = [Sampler(share).trace_id(None) for _ in range(10_000)]
        assert abs(sum(map(bool, traces)) - share * 10_000) <= most
        assert all(len(bytes.fromhex(trace)) == 16 for trace in traces if trace)
    assert Sampler(1.0).trace_id(None) != Sampler(1.0).trace_id(None)


def test_a_traceparent_says_whether_its_call_is_traced():
    for flags, share, trace in (("01", 0.0, TRACE), ("00", 1.0, "")):
        grpc = GrpcOrigins("", sampler=Sampler(share), logged=True)
        rest = RestOrigins(sampler=Sampler(share), logged=True)
        headers = {"traceparent": PARENT + flags}
        for origin in (
            grpc.of(tuple(headers.items()), lambda: "::1"),
            rest.of(headers, "::1", "/r"),
        ):
            assert origin.trace_id == trace
            assert origin.parent.span_id == "b7ad6b7169203331"


def test_what_is_not_told_of_has_no_origin():
    grpc = GrpcOrigins("", sampler=Sampler(0.0), logged=False)
    assert grpc.of((("x-request-id", "mine"),), pytest.fail) is None
    assert RestOrigins(sampler=Sampler(0.0), logged=False).of({}, "::1", "/r") is None
    # The process that computes it decides.
    forwarded = RestOrigins(sampler=Sampler(1.0), logged=False, forwards=True).of({}, "::1", "/r")
    assert forwarded.trace_id == ""


def test_a_collectors_address_is_read():
    plain, other = read_collector("http://127.0.0.1"), read_collector("http://[::1]:99/base/")
    assert (plain.host, plain.port, plain.path) == ("127.0.0.1", 4318, "/v1/traces")
    assert (other.host, other.port, other.path) == ("::1", 99, "/base/v1/traces")
    tls = read_collector("https://a/base")
    assert (tls.host, tls.port, tls.path) == ("a", 443, "/base/v1/traces")
    assert read_collector("https://a:4318").port == 4318
    assert [each.encrypted for each in (plain, other, tls)] == [False, False, True]


@pytest.mark.parametrize("case", HEADER_CASES, ids=lambda case: case["case"])
def test_a_collectors_headers_are_those_of_the_cases(case):
    # cpp_server/tests/spans_test.cc expects the same of the same files.
    content = case["content"].encode()
    if "error" in case:
        with pytest.raises(UserError) as refused:
            parse_collector_headers(content)
        assert str(refused.value) == case["error"]
        return
    assert list(parse_collector_headers(content).items()) == list(map(tuple, case["headers"]))


def test_pauses_double_up_to_the_longest():
    assert [pause_after(n, 0) for n in (1, 2, 4, 5, 6, 10**6)] == [1, 2, 8, 16, 30, 30]
    assert [pause_after(2, wait) for wait in (7, 10**9)] == [7, 30]


def exported(*script, calls=3):
    """The counts and events of an exporter that was given ``calls`` calls, and what the collector got."""
    log = Told()
    with SpanCollector(*script) as collector:
        exporter = SpanExporter(client_of(collector.url), "9.9", log)
        for _ in range(calls):
            exporter.put(REFUSED)
        wait_until(lambda: exporter.sent + exporter.dropped == calls)
        exporter.close()
        return Counter(sent=exporter.sent, dropped=exporter.dropped), log.events, collector


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "trouble",
    [503, (429, {"Retry-After": "1"}, b""), b"SSH-2.0-OpenSSH\r\n\r\n", b""],
    ids=["503", "429", "garbage", "hangs up"],
)
def test_what_a_collector_may_take_later_is_sent_again(trouble):
    counts, events, collector = exported(trouble, trouble)
    assert counts == Counter(sent=3, dropped=0)
    assert len(collector.spans) == 3
    assert [event for event, _ in events] == ["spans_not_sent", "spans_sent_again"]


@pytest.mark.usefixtures("quick")
def test_what_a_collector_does_not_take_is_dropped_and_counted():
    assert exported(*[400] * 3)[0]["dropped"] >= 1
    assert exported(*[502] * 5, calls=1)[0] == Counter(sent=0, dropped=1)
    partly = {"partialSuccess": {"rejectedSpans": "1", "errorMessage": "one is too old"}}
    for body, dropped in ((json.dumps(partly).encode(), 1), (b"\xff", 0), (b"[1]", 0)):
        counts, _, _ = exported((200, {}, body), calls=1)
        assert counts == Counter(sent=1 - dropped, dropped=dropped)


@pytest.mark.parametrize("url", ["http://a..b", "https://.a", f"https://{'a' * 64}"])
def test_a_host_that_cannot_be_one_is_a_failure_like_others(url):
    with pytest.raises(NoAnswerError):
        client_of(url).post(b"{}", 0.3)


@pytest.mark.parametrize(("scheme", "byte"), [("http", b"H"), ("https", b"\x16")])
def test_an_answer_that_trickles_is_given_up(scheme, byte):
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle():
            connected, _ = listening.accept()
            with connected, contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    connected.sendall(byte)

        thread = threading.Thread(target=trickle)
        thread.start()
        collector = client_of(f"{scheme}://127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(NoAnswerError):
            collector.post(b"{}", 0.3)
        ended.set()
        thread.join()


def test_a_collector_that_never_answers_holds_up_neither_calls_nor_the_end(monkeypatch):
    monkeypatch.setattr(span_exporter, "_GATHER_S", 0.0)
    monkeypatch.setattr(span_exporter, "_FLUSH_LIMIT_S", 0.1)
    with SpanCollector(None) as collector:
        exporter = SpanExporter(client_of(collector.url), "9.9", Told())
        exporter.put(REFUSED)
        wait_until(lambda: collector.requests == 1)
        for _ in range(MOST_CALLS + 10):
            exporter.put(REFUSED)
        assert exporter.dropped == 10
        exporter.close()
        exporter.close()
        exporter.put(REFUSED)
        assert exporter.dropped == 11


def test_what_waits_at_the_end_is_sent():
    with SpanCollector() as collector:
        exporter = SpanExporter(client_of(collector.url), "9.9", Told())
        exporter.put(REFUSED)
        exporter.close()
        assert (exporter.sent, len(collector.spans)) == (1, 1)
