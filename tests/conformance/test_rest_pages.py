"""What REST tells of the server and its models is what gRPC tells, in both servers."""

import grpc
import pytest
from google.protobuf import json_format

from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S, RunningServer
from tests.conformance.rest_calls import RestClient

PAGES = {
    "/v2": ipb.ServerMetadataRequest(),
    "/v2/models/ranker": ipb.ModelMetadataRequest(name="ranker"),
    "/v2/models/ranker/versions/3": ipb.ModelMetadataRequest(name="ranker", version="3"),
    "/v2/models/%72anker/config": ipb.ModelConfigRequest(name="ranker"),
    "/v2/models/second/versions/1/config": ipb.ModelConfigRequest(name="second", version="1"),
    "/v2/models/ranker/stats?verbose=1": ipb.ModelStatisticsRequest(name="ranker"),
    "/v2/models/stats": ipb.ModelStatisticsRequest(),
    "/v2/models/nobody": ipb.ModelMetadataRequest(name="nobody"),
    "/v2/models/ranker/versions/9/config": ipb.ModelConfigRequest(name="ranker", version="9"),
    "/v2/models/ranker/versions/%C3%A4/stats": ipb.ModelStatisticsRequest(
        name="ranker", version="ä"
    ),
}
"""Each path, and the call of gRPC that it stands for."""

NOT_THERE = (
    "/v2/",
    "/v2/nothing",
    "/v2/health",
    "/v2/models",
    "/v2/models/",
    "/v2/models//ready",
    "/v2/models/ranker/",
    "/v2/models/ranker/version",
    "/v2/models/ranker/versions",
    "/v2/models/ranker/versions/",
    "/v2/models/ranker/versions//ready",
    "/v2/models/ranker/versions/3/",
    "/v2/models/ranker/versions/3/ready/x",
    "/v2/trace/setting",
    "/v2/systemsharedmemory/status",
    "/v2/repository/index",
)


@pytest.fixture
def rest(server):
    with RestClient(server.http_address) as client:
        yield client


def grpc_answer(server, request):
    """gRPC's answer to ``request`` as an object: numbers of 64 bits are numbers."""
    method = request.DESCRIPTOR.name.removesuffix("Request")
    response = getattr(ipb, f"{method}Response")
    content, call = server.channel.unary_unary(
        f"/inference.GRPCInferenceService/{method}"
    ).with_call(request.SerializeToString(), timeout=TIMEOUT_S)
    assert call.code().name == "OK"
    told = response.FromString(content)
    return json_format.MessageToDict(told, preserving_proto_field_name=True)


def as_messages(found, name):
    """``found``, an object of REST's, as gRPC's message ``name`` and back."""
    message = json_format.ParseDict(found, getattr(ipb, name)())
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def test_pages_tell_what_grpc_tells(server, rest):
    for path, request in PAGES.items():
        reply = rest.get(path)
        assert reply.headers["content-type"].startswith("application/json"), path
        method = request.DESCRIPTOR.name.removesuffix("Request")
        outcome = server.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        if reply.status == 404:
            with pytest.raises(grpc.RpcError) as refused:
                outcome(request.SerializeToString(), timeout=TIMEOUT_S)
            assert refused.value.code().name == "NOT_FOUND"
            assert reply.json == {"error": refused.value.details()}
            continue
        assert reply.status == 200, (path, reply)
        told = grpc_answer(server, request)
        if method == "ModelConfig":
            assert as_messages({"config": reply.json}, "ModelConfigResponse") == told
        else:
            assert as_messages(reply.json, f"{method}Response") == told


def test_readiness_has_the_status(server, rest):
    assert (rest.get("/v2/health/live").status, rest.get("/v2/health/live").json) == (
        200,
        {"live": True},
    )
    ready = rest.get("/v2/health/ready")
    assert (ready.status, ready.json) == (200, {"ready": True})
    for path in ("/v2/models/ranker/ready", "/v2/models/ranker/versions/3/ready"):
        reply = rest.get(path)
        assert (reply.status, reply.json) == (200, {"name": "ranker", "ready": True})
    assert rest.get("/v2/models/nobody/ready").status == 404
    assert rest.get("/v2/models/ranker/versions/9/ready").status == 404


def test_other_paths_are_told_so(rest):
    for path in NOT_THERE:
        reply = rest.get(path)
        expected = {"error": f"there is no {path}; docs/rest.md has the paths"}
        assert (reply.status, reply.json) == (404, expected)


def test_a_page_is_asked_with_get(server):
    for method in ("POST", "PUT", "DELETE"):
        with RestClient(server.http_address) as rest:
            reply = rest.call(method, "/v2/models/ranker")
            posts = "/v2/models/ranker is asked with GET"
            text = posts if method == "POST" else "only GET, HEAD and POST"
            assert (reply.status, reply.json) == (405, {"error": text})
    with RestClient(server.http_address) as rest:
        assert rest.call("HEAD", "/v2/health/ready").content == b""


def test_a_path_that_is_not_utf_8(rest):
    reply = rest.get("/v2/models/%ff%fe/ready")
    assert (reply.status, reply.json) == (404, {"error": "the path is not UTF-8"})


def test_a_server_of_several_processes_tells_the_same(package):
    flags = ["--model", package, "--processes", 2, "--drain-propagation-ms", 0]
    with RunningServer("python", *flags) as server, RestClient(server.http_address) as rest:
        assert rest.get("/v2/health/ready").json == {"ready": True}
        assert rest.get("/v2/models/ranker/ready").status == 200
        request = ipb.ModelMetadataRequest(name="ranker")
        told = as_messages(rest.get("/v2/models/ranker").json, "ModelMetadataResponse")
        assert told == grpc_answer(server, request)
        assert rest.get("/v2/models/nobody").status == 404
