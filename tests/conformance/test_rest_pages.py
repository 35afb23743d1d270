"""What REST tells of the server and its models is what gRPC tells, in both servers, and what docs/openapi.yaml says."""

from pathlib import Path

import grpc
import pytest
import yaml
from google.protobuf import json_format

from tessera.serving.protocol import inference_pb2 as ipb
from tests.conformance.conformance_harness import TIMEOUT_S
from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request
from tests.shared_object import SharedObject

SERVER_FLAGS = ("--shared-memory",)

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
    "/v2/cudasharedmemory/status",
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


def test_every_path_is_refused_alike_by_both_servers(server):
    get, post = "{} is asked with GET", "{} is asked with POST"
    no_path, others = "there is no {}; docs/rest.md has the paths", "only GET, HEAD and POST"
    expected = {
        ("POST", "/metrics"): (405, get),
        ("POST", "/"): (405, get),
        ("PUT", "/healthz"): (405, others),
        ("PUT", "/nothing"): (405, others),
        ("POST", "/nothing"): (404, no_path),
        ("GET", "/v2/repository/index"): (405, post),
        ("GET", "/v2/repository/models/a/load"): (405, post),
        ("GET", "/v2/repository/models/a/relabel"): (404, no_path),
        ("POST", "/v2/repository/models/a/relabel"): (404, no_path),
    }
    for (method, path), (status, text) in expected.items():
        with RestClient(server.http_address) as rest:
            reply = rest.call(method, path)
        assert (reply.status, reply.json) == (status, {"error": text.format(path)}), (method, path)
    with RestClient(server.http_address) as rest:
        reply = rest.get("/nothing")
    pages = b"there is /, /metrics, /healthz, /readyz and /v2\n"
    assert (reply.status, reply.content) == (404, pages)


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


# docs/openapi.yaml

PAGE = Path(__file__).parents[2] / "docs" / "openapi.yaml"
REGIONS = "/v2/systemsharedmemory/"
REPOSITORY_CALLS = ("models/{name}/load", "models/{name}/unload")
NAMES = {"known": ("ranker", "3"), "unknown": ("nobody", "9")}


@pytest.fixture(scope="module")
def page():
    return yaml.safe_load(PAGE.read_text())


def resolved(page, node):
    """``node``, or what it refers to."""
    while "$ref" in node:
        found = page
        for key in node["$ref"].removeprefix("#/").split("/"):
            found = found[key]
        node = found
    return node


def fault(body, schema):
    """Why ``body`` is not as ``schema`` says, or None."""
    import jsonschema  # compiles grammars for some seconds, for every process that collects this file

    validator = jsonschema.validators.validator_for(schema)
    validator.check_schema(schema)
    return jsonschema.exceptions.best_match(validator(schema).iter_errors(body))


def check(page, operation, reply):
    """Hold an answer against what the page says of its status."""
    responses = operation["responses"]
    described = resolved(page, responses.get(str(reply.status), responses.get("default", {})))
    assert described, (operation["operationId"], reply)
    kind = reply.headers["content-type"].partition(";")[0]
    schema = described["content"][kind]["schema"]
    # What a schema refers to is looked for in the schema's own document.
    assert fault(reply.json, {**schema, "components": page["components"]}) is None


@pytest.mark.usefixtures("shares_memory")
def test_every_path_answers_as_the_page_says(server, page):
    statuses = {}
    with SharedObject(b"1") as shared, RestClient(server.http_address) as rest:
        region = {"key": shared.key, "byte_size": 1}
        assert rest.infer(region, path=REGIONS + "region/ranker/register").status == 200
        for path, item in page["paths"].items():
            if "get" not in item:
                continue
            for name, version in NAMES.values():
                reply = rest.get(path.format(name=name, version=version))
                check(page, item["get"], reply)
                statuses.setdefault(path, set()).add(reply.status)
    assert {path for path, seen in statuses.items() if 200 not in seen} == set()
    assert all(404 in seen for path, seen in statuses.items() if "{name}" in path)


def test_infer_answers_as_the_page_says(server, page, drawn):
    message = infer_request(drawn.samples(2))
    with RestClient(server.http_address) as rest:
        for path, item in page["paths"].items():
            if not path.endswith("/infer"):
                continue
            asked = path.format(name="ranker", version="3")
            for more in ({}, {"id": "x", "parameters": {"binary_data_output": True}}):
                body, headers = rest_request(message, **more)
                reply = rest.infer(body, headers, asked)
                assert reply.status == 200
                check(page, item["post"], reply)
            for refused in (b"", b"{}"):
                check(page, item["post"], rest.infer(refused, {}, asked))


@pytest.mark.usefixtures("shares_memory")
def test_calls_about_regions_answer_as_the_page_says(server, page):
    with SharedObject(b"1") as shared, RestClient(server.http_address) as rest:

        def ask(path, name, status, **region):
            reply = rest.infer(region, path=REGIONS + path.format(name=name))
            assert reply.status == status
            check(page, page["paths"][REGIONS + path]["post"], reply)

        ask("region/{name}/register", "own", 200, key=shared.key, byte_size=1)
        ask("region/{name}/register", "own", 409, key=shared.key, byte_size=1)
        ask("region/{name}/register", "other", 404, key="/tessera-absent", byte_size=1)
        ask("region/{name}/unregister", "own", 200)
        ask("unregister", "", 200)


def test_calls_about_repositories_answer_as_the_page_says(server, page):
    request = {"components": page["components"]}
    with RestClient(server.http_address) as rest:
        for verb, body, status in (
            ("index", {"ready": True}, 200),
            ("index", {"redy": True}, 400),
            ("models/{name}/load", {"parameters": {"version": 3, "label": "stable"}}, 400),
            ("models/{name}/unload", {"parameters": {"version": "3"}}, 400),
        ):
            path = f"/v2/repository/{verb}"
            reply = rest.infer(body, path=path.format(name="ranker"))
            assert reply.status == status
            operation = page["paths"][path]["post"]
            check(page, operation, reply)
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            if "redy" in body:
                assert fault(body, schema | request) is not None
            else:
                assert fault(body, schema | request) is None


def test_the_page_has_every_path(page):
    model = ["", "/ready", "/config", "/stats", "/infer"]
    expected = {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"}
    for part in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        expected |= {part + verb for verb in model}
    regions = ("status", "unregister")
    expected |= {REGIONS + verb for verb in regions}
    expected |= {f"{REGIONS}region/{{name}}/{verb}" for verb in (*regions, "register")}
    expected |= {f"/v2/repository/{verb}" for verb in ("index", *REPOSITORY_CALLS)}
    assert set(page["paths"]) == expected
    operations = [
        one["operationId"]
        for item in page["paths"].values()
        for one in item.values()
        if "operationId" in one
    ]
    assert len(set(operations)) == len(operations) == len(expected)


def test_the_page_is_of_the_infer_requests_that_are_sent(page, drawn):
    schema = {"$ref": "#/components/schemas/InferRequest", "components": page["components"]}
    message = infer_request(drawn.samples(2))
    for more in ({}, {"rows": True}, {"outputs": [{"name": "default"}]}):
        body, _ = rest_request(message, **more)
        assert fault(yaml.safe_load(body), schema) is None
    assert fault({"inputs": [{"name": "x"}]}, schema) is not None
