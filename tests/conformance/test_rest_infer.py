"""Scores over REST: the bits that gRPC gives, whichever way tensors travel."""

import gzip
import signal
import zlib

import numpy as np
import pytest

from tests.conformance.conformance_harness import RunningServer, i64, same_bits, scores_of
from tests.conformance.rest_calls import RestClient, outputs_of, rest_request
from tests.kserve_messages import infer, infer_request
from tests.kserve_messages import outputs_of as outputs_of_grpc
from tests.string_requests import in_both_forms, infer_with_strings

SIZES = (1, 2, 3, 17, 100)


@pytest.fixture
def rest(server):
    with RestClient(server.http_address) as client:
        yield client


def test_scores_are_those_of_grpc(server, rest, draw_with):
    for size in SIZES:
        message = draw_with(seed=size).samples(size)
        wanted = scores_of(server.predict(message))
        for binary in ((), True, ("id_list_features_values",)):
            for asked in (
                {},
                {"parameters": {"binary_data_output": True}},
                {"outputs": [{"name": "default", "parameters": {"binary_data": True}}]},
                {"outputs": [{"name": "default"}], "parameters": {"binary_data_output": False}},
            ):
                body, headers = rest_request(
                    infer_request(message),
                    binary=binary,
                    rows=size % 2,
                    id=f"request {size}",
                    **asked,
                )
                reply = rest.infer(body, headers)
                assert same_bits(outputs_of(reply)["default"], wanted), (size, binary, asked)
                told = {key: reply.json[key] for key in ("model_name", "model_version", "id")}
                assert told == {
                    "model_name": "ranker",
                    "model_version": "3",
                    "id": f"request {size}",
                }


def test_the_connection_is_kept(server, rest, drawn):
    body, headers = rest_request(infer_request(drawn.samples(1)))
    rest.infer(body, headers)
    kept = rest.connection.sock
    assert kept is not None
    for _ in range(20):
        assert rest.infer(body, headers).status == 200
        assert rest.get("/healthz").status == 200
        assert rest.infer({"inputs": []}).status == 400
    assert rest.connection.sock is kept
    rest.call("POST", "/v2/models/ranker/infer", body, {**headers, "Connection": "close"})
    assert rest.connection.sock is None


def test_paths_name_models_and_versions(server, rest, drawn):
    body, headers = rest_request(infer_request(drawn.samples(2)))
    for path in ("ranker", "r%61nker", "ranker/versions/3"):
        assert rest.infer(body, headers, f"/v2/models/{path}/infer?a=b").status == 200
    assert rest.infer(body, headers, "/v2/models/second/infer").json["model_name"] == "second"
    for path in ("nobody", "ranker/versions/4"):
        refused = rest.infer(body, headers, f"/v2/models/{path}/infer")
        message = drawn.samples(2)
        message.model_name, _, message.model_version = path.replace("/versions", "").partition("/")
        code, text = server.outcome(message.SerializeToString())
        assert (refused.status, refused.json, code) == (404, {"error": text}, "NOT_FOUND")


def test_missing_values_and_text_that_json_writes_differently(server, rest, drawn):
    message = drawn.samples(2)
    dense = np.frombuffer(message.float_features.values, "<f4").copy()
    dense[:3] = np.nan, 0.1, 7
    message.float_features.values = dense.tobytes()
    body, headers = rest_request(infer_request(message))
    text = body.decode().replace("0.10000000149011612", "\n1000E-4\t").replace("7.0", "7")
    reply = rest.infer(text.replace("float_features", "\\u0066loat_features", 1).encode(), headers)
    assert same_bits(outputs_of(reply)["default"], scores_of(server.predict(message)))


def test_strings_in_json_and_as_binary_data(server, rest, drawn, in_process):
    ids, strings = in_both_forms(drawn.samples(3), in_process.manifest.schema)
    wanted = scores_of(server.predict(ids))
    for binary in ((), True):
        body, headers = rest_request(infer_with_strings(ids, strings), binary=binary)
        assert same_bits(outputs_of(rest.infer(body, headers))["default"], wanted)


def test_packed_bodies(server, rest, drawn):
    message = drawn.samples(5)
    wanted = scores_of(server.predict(message))
    for binary in ((), True):
        body, headers = rest_request(infer_request(message), binary=binary)
        for name, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
            reply = rest.infer(packed, {**headers, "Content-Encoding": name})
            assert same_bits(outputs_of(reply)["default"], wanted)
    bomb = gzip.compress(bytes(65 * 1024 * 1024), 9)
    for content, status, text in (
        (bomb, 413, "the body unpacks to more than 67108864 bytes, the limit"),
        (
            gzip.compress(body)[:-3],
            400,
            f"({len(gzip.compress(body)) - 3} bytes) is not valid gzip",
        ),
        (gzip.compress(body) + b"x", 400, "is not valid gzip"),
        (body, 400, f"the body ({len(body)} bytes) is not valid gzip"),
        (b"", 400, "the body (0 bytes) is not valid gzip"),
    ):
        reply = rest.infer(content, {"Content-Encoding": "gzip"})
        assert reply.status == status
        assert text in reply.json["error"]
    reply = rest.infer(body, {"Content-Encoding": "br"})
    expected = "Content-Encoding is 'br', expected gzip or deflate"
    assert (reply.status, reply.json) == (400, {"error": expected})


def test_parameters_are_obeyed(server, rest, drawn):
    message = drawn.samples(1)
    for parameters in (
        {"priority": 1, "timeout": 60_000_000, "anything": 1.5, "sequence_id": 0},
        {"traffic_key": "a user", "huge": 2**64 - 1, "larger": 2**70, "flag": True},
    ):
        body, headers = rest_request(infer_request(message), parameters=parameters)
        assert rest.infer(body, headers).status == 200
    body, headers = rest_request(infer_request(message), parameters={"timeout": 1})
    late = rest.infer(body, headers)
    assert late.status in {200, 504}  # a microsecond may be enough
    assert late.status == 200 or "deadline" in late.json["error"]


def test_calls_are_counted_as_those_of_grpc(server, rest, drawn):
    def counts():
        return {
            name: server.value("tessera_requests_total", model=model, code=code)
            for name, model, code in (
                ("answered", "ranker", "OK"),
                ("refused", "ranker", "INVALID_ARGUMENT"),
                ("unreadable", "", "INVALID_ARGUMENT"),
                ("unknown", "", "NOT_FOUND"),
            )
        } | {"invalid": server.value("tessera_rejected_total", reason="invalid")}

    before = counts()
    body, headers = rest_request(infer_request(drawn.samples(1)))
    assert rest.infer(body, headers).status == 200
    assert rest.infer({"inputs": []}).status == 400
    assert rest.infer(b"{").status == 400
    assert rest.infer(body, headers, "/v2/models/nobody/infer").status == 404
    server.wait_for(lambda: sum(counts().values()) == sum(before.values()) + 6)
    after = counts()
    assert {name: after[name] - before[name] for name in before} == {
        "answered": 1,
        "refused": 1,
        "unreadable": 1,
        "unknown": 1,
        "invalid": 2,
    }


def test_a_server_that_drains_refuses_and_ends_connections(kind, package, drawn):
    flags = ["--model", package, "--drain-propagation-ms", 0]
    with RunningServer(kind, *flags) as server:
        with RestClient(server.http_address) as rest, RestClient(server.http_address) as slow:
            body, headers = rest_request(infer_request(drawn.samples(1)))
            assert rest.infer(body, headers).status == 200
            assert slow.infer(body, headers).status == 200
            server.signal(signal.SIGTERM)
            try:
                while (reply := rest.infer(body, headers)).status == 200:
                    pass
                assert (reply.status, reply.json) == (503, {"error": "the server is draining"})
                assert reply.headers["connection"] == "close"
            except OSError:
                pass  # the port has closed
        assert server.exit_status() == 0


def test_a_server_of_several_processes_gives_the_same(package, drawn):
    flags = ["--model", package, "--processes", 2, "--drain-propagation-ms", 0]
    with RunningServer("python", *flags) as server, RestClient(server.http_address) as rest:
        message = drawn.samples(3)
        body, headers = rest_request(infer_request(message), binary=True, id="x")
        wanted = outputs_of_grpc(infer(server, infer_request(message)))["default"]
        assert same_bits(outputs_of(rest.infer(body, headers))["default"], wanted)
        refused = rest.infer(body, headers, "/v2/models/nobody/infer")
        assert (refused.status, "'nobody' is unknown" in refused.json["error"]) == (404, True)
        assert rest.infer(b"{}").json == {"error": "inputs is not a list"}
        assert rest.get("/v2/health/ready").json == {"ready": True}
        assert rest.get("/v2/models/ranker/ready").status == 200
        assert rest.get("/v2/models/ranker").json["versions"] == ["3"]
        assert rest.get("/v2/models/nobody").status == 404


def test_large_bags_in_json(server, rest, drawn):
    message = drawn.samples(1)
    ids = 90_000
    features = message.id_list_features.num_features
    lengths = np.zeros(features, "<i4")
    lengths[-1] = ids
    message.id_list_features.lengths = lengths.tobytes()
    message.id_list_features.values_int64 = i64(np.arange(ids) % 7)
    body, headers = rest_request(infer_request(message))
    assert len(body) < 4 * 1024 * 1024
    wanted = scores_of(server.predict(message))
    assert same_bits(outputs_of(rest.infer(body, headers))["default"], wanted)
