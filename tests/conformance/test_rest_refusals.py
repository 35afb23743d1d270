"""What is wrong with a request over REST is told in one sentence, the same in both servers; and no server dies of it."""

import contextlib
import json
import random

import numpy as np
import pytest

from tests.conformance.conformance_harness import RunningServer, same_bits
from tests.conformance.rest_calls import RestClient, outputs_of, rest_request
from tests.conformance.rest_refusals import REFUSALS
from tests.kserve_messages import infer_request

INFER = "/v2/models/ranker/infer"
MUTATIONS = 400


@pytest.fixture
def rest(server):
    with RestClient(server.http_address) as client:
        yield client


@pytest.fixture
def good(drawn):
    return rest_request(infer_request(drawn.samples(2)))[0]


def test_what_is_wrong_is_told(rest, good):
    assert len(REFUSALS) >= 60
    for name, (change, text) in REFUSALS.items():
        body = json.loads(good)
        changed = change(body)
        reply = rest.infer(body if changed is None else changed)
        assert (reply.status, list(reply.json)) == (400, ["error"]), (name, reply)
        assert reply.headers["content-type"].startswith("application/json")
        told = reply.json["error"]
        assert told == text or (name == "lists in rows" and text in told), (name, told)
    assert rest.infer(good).status == 200


def test_heads_that_are_refused(server, good):
    binary = {"Inference-Header-Content-Length": str(len(good))}
    for headers, status, text in (
        (
            {"Inference-Header-Content-Length": "x"},
            400,
            "Inference-Header-Content-Length is not a number",
        ),
        (
            {"Inference-Header-Content-Length": "-1"},
            400,
            "Inference-Header-Content-Length is not a number",
        ),
        (
            {"Inference-Header-Content-Length": "9" * 19},
            400,
            "Inference-Header-Content-Length is not a number",
        ),
        (
            {"Inference-Header-Content-Length": "999999"},
            400,
            f"Inference-Header-Content-Length is 999999, the body has {len(good)} bytes",
        ),
        (
            {"Inference-Header-Content-Length": "0"},
            400,
            "the JSON (0 bytes) is not valid, or has a number",
        ),
        (
            {"Origin": "http://localhost"},
            403,
            "a request with an Origin comes from a web page, and is not heard",
        ),
        (
            {"Transfer-Encoding": "chunked"},
            411,
            "send the body as a whole, with its Content-Length",
        ),
        (
            {"Content-Length": str(2**26 + 1)},
            413,
            "the body has more than 67108864 bytes, the limit",
        ),
    ):
        with RestClient(server.http_address) as rest:
            told = {"Content-Length": str(len(good)), **headers}
            if "Transfer-Encoding" in headers:
                del told["Content-Length"]
            rest.connection.putrequest("POST", INFER)
            for name, value in told.items():
                rest.connection.putheader(name, value)
            rest.connection.endheaders()
            if status == 400:
                rest.connection.send(good)
            reply = rest.connection.getresponse()
            assert (reply.status, text in json.loads(reply.read())["error"]) == (status, True)
    with RestClient(server.http_address) as rest:
        reply = rest.infer(good + b"12345", binary)
        expected = {"error": "the body has 5 bytes behind the binary data of its inputs"}
        assert (reply.status, reply.json) == (400, expected)
        reply = rest.call("GET", INFER)
        assert (reply.status, reply.json) == (405, {"error": f"{INFER} is asked with POST"})


def mutated(draw, body):
    """``body`` with one to three of its bytes changed, taken out, doubled, or moved."""
    content = bytearray(body)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(content))
        choice = draw.randrange(5)
        if choice == 0:
            content[at] = draw.randrange(256)
        elif choice == 1:
            del content[at]
        elif choice == 2:
            content[at:at] = draw.choice(
                [b"[", b"]", b"{", b"}", b",", b'"', b"-", b"e", b"9" * 19]
            )
        elif choice == 3:
            other = draw.randrange(len(content))
            content[at:at] = content[other : other + draw.randint(1, 40)]
        else:
            other = draw.choice([b"true", b"null", b"1.5", b"1e309", b'"\\ud800"', b"[]", b"-0"])
            end = content.find(b",", at)
            content[at : end if end > 0 else at] = other
    return bytes(content)


def test_both_servers_judge_changed_bodies_alike(both_kinds, package, drawn):
    draw = random.Random(5)
    message = infer_request(drawn.samples(2))
    bodies = [rest_request(message), rest_request(message, binary=True)]
    flags = ["--model", package, "--drain-propagation-ms", 0]
    with contextlib.ExitStack() as stack:
        clients = []
        for kind in both_kinds:
            server = stack.enter_context(RunningServer(kind, *flags))
            clients.append(stack.enter_context(RestClient(server.http_address)))
        statuses = set()
        for _ in range(MUTATIONS):
            body, headers = draw.choice(bodies)
            changed = mutated(draw, body)
            one, two = (client.infer(changed, headers) for client in clients)
            assert one.status == two.status, (changed, one, two)
            statuses.add(one.status)
            if one.status != 200:
                assert one.json == two.json, changed
                continue
            first, second = outputs_of(one), outputs_of(two)
            assert all(same_bits(first[name], second[name]) for name in first), changed
            assert {**one.json, "outputs": 0} == {**two.json, "outputs": 0}
        assert statuses == {200, 400}
        assert np.isfinite(first["default"]).all()
