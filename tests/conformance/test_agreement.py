"""Both servers give the same answer, status and message to the same bytes, good or bad."""

import functools

import grpc
import numpy as np
import pytest

from tessera.serving.protocol import predictor_pb2 as pb
from tests.conformance.conformance_harness import RunningServer
from tests.kserve_messages import infer, infer_request, raw_infer
from tests.patience import PATIENCE_S
from tests.string_requests import in_both_forms, infer_with_strings

ROUNDS = 1500


@pytest.fixture(scope="module")
def pair(both_kinds, package):
    flags = ["--model", package, "--max-request-samples", 1000, "--max-request-ids", 5000]
    flags += ["--drain-propagation-ms", 0]
    with RunningServer(both_kinds[0], *flags) as one, RunningServer(both_kinds[1], *flags) as two:
        yield one, two


def mutated(rng, content):
    """A few bytes changed, cut out or put in."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(len(data), 1)))
        kind = rng.integers(0, 4)
        if kind == 0 and data:
            data[at] = rng.integers(0, 256)
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 2:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif data:
            data[at] ^= 1 << int(rng.integers(0, 8))
    return bytes(data)


def comparable(code, text):
    # What a parser says of bytes that it cannot read is the parser's own.
    return code, text.partition(" is not a valid ")[0]


def test_mutated_requests(pair, draw_with):
    rng = np.random.default_rng(0)
    drawn = draw_with(seed=3, max_bag=3)
    seen = {}
    for round_number in range(ROUNDS):
        B = int(rng.integers(1, 4))
        message = drawn.ranking(B) if rng.random() < 0.3 else drawn.samples(B)
        if rng.random() < 0.3:
            message = in_both_forms(message, drawn.schema)[1]
        content = mutated(rng, message.SerializeToString())
        one, two = (comparable(*server.outcome(content)) for server in pair)
        assert one == two, (round_number, content)
        seen[one[0]] = seen.get(one[0], 0) + 1
    # The mutations reach all three; else the comparison says little.
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen.keys() | {"NOT_FOUND"}
    assert seen["INVALID_ARGUMENT"] > ROUNDS // 3
    assert seen["OK"] > ROUNDS // 20


def test_good_answers_are_the_same_messages(pair, drawn):
    for size in (1, 7, 100):
        content = drawn.samples(size).SerializeToString()
        one, two = (
            pb.PredictionResponse.FromString(server.raw(content, timeout=PATIENCE_S))
            for server in pair
        )
        one.ClearField("timings")
        two.ClearField("timings")
        assert one == two


def infer_outcome(server, content):
    try:
        raw_infer(server)(content, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return comparable(error.code().name, error.details())
    return "OK", ""


def test_mutated_infer_requests(pair, draw_with):
    rng = np.random.default_rng(1)
    drawn = draw_with(seed=4, max_bag=3)
    seen = {}
    for round_number in range(ROUNDS):
        message = drawn.samples(int(rng.integers(1, 4)))
        ids, strings = in_both_forms(message, drawn.schema)
        make = infer_request if rng.random() < 0.7 else functools.partial(infer_with_strings, ids)
        given = strings if make is not infer_request else message
        request = make(given, typed=rng.random() < 0.5, id="x")
        if rng.random() < 0.3:
            request.parameters["timeout"].int64_param = 50_000_000
            request.parameters["priority"].uint64_param = 5
            request.outputs.add(name="default").parameters["anything"].bool_param = True
        content = mutated(rng, request.SerializeToString(deterministic=True))
        one, two = (infer_outcome(server, content) for server in pair)
        if "DEADLINE_EXCEEDED" in {one[0], two[0]}:
            continue  # the mutation shortened the timeout
        assert one == two, (round_number, content)
        seen[one[0]] = seen.get(one[0], 0) + 1
    assert {"OK", "INVALID_ARGUMENT"} <= seen.keys()
    assert seen["INVALID_ARGUMENT"] > ROUNDS // 3
    assert seen["OK"] > ROUNDS // 20


def test_good_infer_answers_are_the_same_messages(pair, drawn):
    for size in (1, 7, 100):
        request = infer_request(drawn.samples(size), id="x")
        one, two = (infer(server, request) for server in pair)
        assert one == two
