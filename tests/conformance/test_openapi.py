"""docs/openapi.yaml, held against what both servers answer."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request

PAGE = Path(__file__).parents[2] / "docs" / "openapi.yaml"
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


def check(page, operation, reply):
    """Hold an answer against what the page says of its status."""
    responses = operation["responses"]
    described = resolved(page, responses.get(str(reply.status), responses.get("default", {})))
    assert described, (operation["operationId"], reply)
    kind = reply.headers["content-type"].partition(";")[0]
    schema = described["content"][kind]["schema"]
    # What a schema refers to is looked for in the schema's own document.
    jsonschema.validate(reply.json, {**schema, "components": page["components"]})


def test_every_path_answers_as_the_page_says(server, page):
    statuses = {}
    with RestClient(server.http_address) as rest:
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
            if "post" not in item:
                continue
            asked = path.format(name="ranker", version="3")
            for more in ({}, {"id": "x", "parameters": {"binary_data_output": True}}):
                body, headers = rest_request(message, **more)
                reply = rest.infer(body, headers, asked)
                assert reply.status == 200
                check(page, item["post"], reply)
            for refused in (b"", b"{}"):
                check(page, item["post"], rest.infer(refused, {}, asked))


def test_the_page_has_every_path(page):
    model = ["", "/ready", "/config", "/stats", "/infer"]
    expected = {"/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"}
    for part in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        expected |= {part + verb for verb in model}
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
        jsonschema.validate(yaml.safe_load(body), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"inputs": [{"name": "x"}]}, schema)
