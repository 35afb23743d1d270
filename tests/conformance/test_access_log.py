"""--access-log and --otlp-endpoint: the same calls leave the same lines and the same spans in both servers."""

import json
import re
import signal
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from tests.conformance.conformance_harness import TIMEOUT_S
from tests.conformance.conftest import Drawn
from tests.conformance.rest_calls import RestClient, rest_request
from tests.conformance.test_trouble import queued, waiting_server
from tests.kserve_messages import infer_request, raw_infer
from tests.span_collector import SpanCollector

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"
BATCH = 100
"""Samples that make a whole batch, which is computed at once; fewer wait."""

DELAY_US = 15_000_000
"""How long fewer wait: long enough to fill the queue meanwhile, and no longer, as calls that were cancelled stay in it."""

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def told_id(call):
    return dict(call.trailing_metadata() or ()).get("x-request-id")


def ask(method, content, request_id, *more, code="OK", **options):
    """Call, and hold what the answer says of its id against what was given."""
    metadata = (("x-request-id", request_id), *more)
    call = method.with_call
    try:
        _, ended = call(content, metadata=metadata, timeout=TIMEOUT_S, **options)
    except grpc.RpcError as error:
        ended = error
    assert (ended.code().name, told_id(ended)) == (code, request_id)


def ask_rest(rest, body, request_id, status, path="/v2/models/ranker/infer", **headers):
    reply = rest.infer(body, {"X-Request-Id": request_id, **headers}, path=path)
    assert (reply.status, reply.headers["x-request-id"]) == (status, request_id), reply


def ids_of(message):
    groups = (message.id_list_features, message.id_score_list_features)
    return sum(int(np.frombuffer(group.lengths, "<i4").sum()) for group in groups)


def make_calls(server, whole, one):
    """Every way in which a call may end that can be brought about at will."""
    infer, content = raw_infer(server), infer_request(whole).SerializeToString()
    # First: once a batch's time is known, one is cut before a deadline passes.
    late = infer_request(one)
    late.parameters["timeout"].int64_param = 300_000
    ask(infer, late.SerializeToString(), "late", code="DEADLINE_EXCEEDED")
    ask(server.raw, whole.SerializeToString(), "predict", ("traceparent", PARENT))
    ask(infer, content, "infer", ("traceparent", UNSAMPLED))
    ask(server.raw, b"\xff", "not a message", code="INVALID_ARGUMENT")
    unfit, unknown = type(one)(), type(one)()
    unfit.CopyFrom(one)
    unfit.float_features.values = b"123"
    ask(server.raw, unfit.SerializeToString(), "unfit", code="INVALID_ARGUMENT")
    unknown.CopyFrom(one)
    unknown.model_name = "nobody"
    ask(server.raw, unknown.SerializeToString(), "unknown", code="NOT_FOUND")
    waiting = [
        server.start(one, metadata=[("x-request-id", name)], timeout=TIMEOUT_S)
        for name in ("waits", "waits, too")
    ]
    server.wait_for(queued(server, 2))
    ask(server.raw, one.SerializeToString(), "no room", code="RESOURCE_EXHAUSTED")
    for call in waiting:
        call.cancel()
    server.wait_for(queued(server, 0))
    with RestClient(server.http_address) as rest:
        body, headers = rest_request(infer_request(whole), binary=True)
        ask_rest(rest, body, "rest", 200, traceparent=PARENT, **headers)
        ask_rest(rest, b"{", "rest, not JSON", 400)
        path = "/v2/models/nobody/infer"
        ask_rest(rest, body, "rest, unknown", 404, path=path, **headers)
        packed = {"Content-Encoding": "gzip"}
        ask_rest(rest, b"not gzip", "rest, not packed", 400, **packed)
        reply = rest.infer(body, headers)
        assert len(bytes.fromhex(reply.headers["x-request-id"])) == 16
    _, made = server.raw.with_call(whole.SerializeToString(), timeout=TIMEOUT_S)
    assert len(bytes.fromhex(told_id(made))) == 16
    return {reply.headers["x-request-id"]: "rest, no id", told_id(made): "no id"}


def lines_of(*paths):
    return [json.loads(line) for path in paths if path.exists() for line in path.open()]


SPANS = 4 * 6 + 10
"""What the calls of `make_calls` leave: four are traced and answered, ten are traced and refused."""


@dataclass
class Told:
    """What a server has told of the calls: lines by their names, and what its collector got."""

    lines: dict
    spans: list
    resources: list


def collect(kind, package, whole, one, folder):
    path, old = folder / f"{kind}.log", folder / f"{kind}.1"
    # At first the collector is of no use.
    with SpanCollector(503, b"no HTTP\r\n\r\n") as collector:
        tracing = ["--otlp-endpoint", collector.url, "--trace-share", 1]
        flags = ["--access-log", path, "--max-queue-requests", 2, "--max-batch-samples", BATCH]
        with waiting_server(kind, package, *flags, *tracing, delay_us=DELAY_US) as server:
            made = make_and_follow(server, whole, one, path, old)
            sent = lambda: server.value("tessera_spans_total", result="sent")  # noqa: E731 - it is one line
            server.wait_for(lambda: sent() == SPANS)
            assert server.value("tessera_spans_total", result="dropped") == 0
            # The drain sends what has not been sent.
            ask(server.raw, whole.SerializeToString(), "after")
            server.signal()
            assert server.exit_status() == 0
            events = [line["event"] for line in server.log]
            assert events.count("spans_not_sent") == events.count("spans_sent_again") == 1
    lines = lines_of(old, path)
    for line in lines:
        line["request_id"] = made.get(line["request_id"], line["request_id"])
    for span in collector.spans:
        name = span["attributes"].get("tessera.request_id")
        if name is not None:
            span["attributes"]["tessera.request_id"] = made.get(name, name)
    return Told({line["request_id"]: line for line in lines}, collector.spans, collector.resources)


def make_and_follow(server, whole, one, path, old):
    """Make the calls; their lines are in ``old`` then, and ``path`` is for those that follow."""
    made = make_calls(server, whole, one)
    counted = lambda: server.value("tessera_requests_total")  # noqa: E731 - it is one line
    server.wait_for(lambda: len(lines_of(path)) == counted() == 15)
    path.rename(old)
    server.signal(signal.SIGHUP)
    events = lambda: [line["event"] for line in server.log]  # noqa: E731 - it is one line
    server.wait_for(lambda: "access_log_reopened" in events())
    assert server.value("tessera_log_lines_dropped_total", log="access") == 0
    return made


@pytest.fixture(scope="module")
def messages(in_process):
    drawn = Drawn(in_process.manifest.schema)
    return drawn.samples(BATCH), drawn.samples(1)


@pytest.fixture(scope="module")
def told(both_kinds, package, messages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    return {kind: collect(kind, package, *messages, folder) for kind in both_kinds}


def check_times(line):
    """Take out what differs from call to call, where it is as it should be."""
    assert TIME.fullmatch(line.pop("time"))
    took = line.pop("duration_ms")
    assert 0 <= took < TIMEOUT_S * 1e3
    answered = line["code"] == "OK"
    assert {"queue_ms", "forward_ms"} & line.keys() == (
        {"queue_ms", "forward_ms"} if answered else set()
    )
    if answered:
        # Each is cut to microseconds.
        assert 0 <= line.pop("queue_ms") + line.pop("forward_ms") <= took + 0.002


def server_spans(told):
    """The server spans by their calls' names."""
    found = [span for span in told.spans if span["kind"] == 2]
    return {span["attributes"]["tessera.request_id"]: span for span in found}


def without_trace(line):
    return {name: value for name, value in line.items() if name != "trace_id"}


def test_the_same_calls_leave_the_same_lines(told, messages):
    whole, one = messages
    python, cpp = ({n: dict(line) for n, line in one.lines.items()} for one in told.values())
    traces = {
        kind: {n: s["traceId"] for n, s in server_spans(one).items()} for kind, one in told.items()
    }
    assert python.keys() == cpp.keys()
    assert len(cpp) == 16
    for line in (*python.values(), *cpp.values()):
        check_times(line)
        assert line["peer"] == "127.0.0.1"
    for name, line in python.items():
        assert list(line) == list(cpp[name]), name
    for name in cpp:
        assert without_trace(python[name]) == without_trace(cpp[name])
        for kind, lines in (("python", python), ("cpp", cpp)):
            assert lines[name]["trace_id"] == traces[kind].get(name, TRACE)
    assert {name: (line["code"], line["samples"]) for name, line in cpp.items()} == {
        "predict": ("OK", BATCH),
        "infer": ("OK", BATCH),
        "not a message": ("INVALID_ARGUMENT", 0),
        "unfit": ("INVALID_ARGUMENT", 0),
        "unknown": ("NOT_FOUND", 0),
        "late": ("DEADLINE_EXCEEDED", 1),
        "waits": ("CANCELLED", 1),
        "waits, too": ("CANCELLED", 1),
        "no room": ("RESOURCE_EXHAUSTED", 1),
        "rest": ("OK", BATCH),
        "rest, not JSON": ("INVALID_ARGUMENT", 0),
        "rest, unknown": ("NOT_FOUND", 0),
        "rest, not packed": ("INVALID_ARGUMENT", 0),
        "rest, no id": ("OK", BATCH),
        "no id": ("OK", BATCH),
        "after": ("OK", BATCH),
    }
    for name, line in cpp.items():
        protocol, method = line["protocol"], line["method"]
        rest = name.startswith("rest")
        assert protocol == ("rest" if rest else "grpc")
        assert method == ("ModelInfer" if rest or name in {"infer", "late"} else "Predict")
        assert line.get("http_status") == (
            {"OK": 200, "NOT_FOUND": 404, "INVALID_ARGUMENT": 400}[line["code"]] if rest else None
        )
        assert (line["trace_id"] == TRACE) is (name in {"predict", "infer", "rest"})
        named = line["code"] in {"OK", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}
        known = ("ranker", "3") if named or name == "unfit" else ("", "")
        assert (line["model"], line["version"]) == known
        assert line["ids"] == {BATCH: ids_of(whole), 1: ids_of(one), 0: 0}[line["samples"]]


def times(span):
    return int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])


def check_trace(name, server, children, line):
    """A call's spans: where they hang, and when they were."""
    given = name in {"predict", "rest"}
    assert server.get("parentSpanId") == (SPAN if given else None)
    assert server["traceId"] == line["trace_id"]
    begin, end = times(server)
    assert abs((end - begin) / 1e6 - line["duration_ms"]) <= 0.0011
    answered = line["code"] == "OK"
    assert [span["name"] for span in children] == (
        ["decode", "queue", "assemble", "forward", "encode"] if answered else []
    )
    for span in children:
        assert span["parentSpanId"] == server["spanId"]
        assert span["traceId"] == server["traceId"]
        assert begin <= times(span)[0]
        begin = times(span)[1]
    if answered:
        assert begin == end
        queue, forward = (times(children[i]) for i in (1, 3))
        assert abs((queue[1] - queue[0]) / 1e6 - line["queue_ms"]) <= 0.0011
        assert abs((forward[1] - forward[0]) / 1e6 - line["forward_ms"]) <= 0.0011


def without_ids(span):
    varying = {"traceId", "spanId", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano"}
    return {name: value for name, value in span.items() if name not in varying}


def test_the_same_calls_leave_the_same_spans(told):
    plain = {}
    for kind, one in told.items():
        assert len(one.spans) == len({span["spanId"] for span in one.spans}) == SPANS + 6
        servers = server_spans(one)
        assert servers.keys() == one.lines.keys() - {"infer"}
        traces = {span["traceId"] for span in servers.values()}
        assert len(traces) == len(servers) - 1  # two calls have the same traceparent
        for name, server in servers.items():
            children = [s for s in one.spans if s.get("parentSpanId") == server["spanId"]]
            check_trace(name, server, children, one.lines[name])
            plain.setdefault(name, []).append([without_ids(s) for s in (server, *children)])
        for resource in one.resources:
            assert resource["tessera.server"] == kind
            assert resource["service.name"] == "tessera"
            assert {"service.version", "host.name", "process.pid"} <= resource.keys()
    for name, (python, cpp) in plain.items():
        assert python == cpp, name
    attributes = plain["predict"][0][0]["attributes"]
    assert attributes["rpc.service"] == "predictor.Predictor"
    assert attributes["rpc.grpc.status_code"] == 0
    assert (attributes["tessera.model"], attributes["tessera.samples"]) == ("ranker", BATCH)
    assert plain["late"][0][0]["status"] == {"code": 2}
    assert plain["rest, not JSON"][0][0]["attributes"]["http.response.status_code"] == 400
