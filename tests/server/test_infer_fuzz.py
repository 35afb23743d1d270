"""ModelInfer under malformed requests: a proper status each, and a server that goes on.

As `test_fuzz` does for Predict: valid messages with one part damaged so that it cannot be valid,
messages with random fields, and random bytes.
"""

import grpc
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.request.infer_tensors import TENSORS
from tests.kserve_messages import DTYPES, FIELDS, infer_request, outputs_of, raw_infer
from tests.patience import PATIENCE_S
from tests.server.server_harness import config, request, scores_of, serving, value

GOOD = request(3, bag=2)
GOOD_CONTENT = infer_request(GOOD).SerializeToString()
GOOD_SCORES = scores_of(GOOD)
EXAMPLES = 300  # of each of the three sources

ALLOWED = {"INVALID_ARGUMENT", "NOT_FOUND"}
NAMES = [tensor.name for tensor in TENSORS]


@pytest.fixture(scope="module")
def server():
    limits = ModelLimits(workers=1, max_request_samples=1000, max_request_ids=100_000)
    with serving(config(limits=limits)) as running:
        yield running


def outcome(server, content, method="ModelInfer"):
    try:
        server.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(
            content, timeout=PATIENCE_S
        )
    except grpc.RpcError as error:
        return error.code().name if error.details() else "no message"
    return "OK"


def still_good(server):
    content = raw_infer(server)(GOOD_CONTENT, timeout=PATIENCE_S)
    found = outputs_of(ipb.ModelInferResponse.FromString(content))["default"]
    np.testing.assert_array_equal(found, GOOD_SCORES)


int64s = st.integers(-(2**63), 2**63 - 1)
parameters = st.one_of(
    st.builds(ipb.InferParameter, int64_param=int64s),
    st.builds(ipb.InferParameter, uint64_param=st.integers(0, 2**64 - 1)),
    st.builds(ipb.InferParameter, string_param=st.text(max_size=5)),
    st.builds(ipb.InferParameter, double_param=st.floats()),
    st.builds(ipb.InferParameter, bool_param=st.booleans()),
    st.builds(ipb.InferParameter),
)


def damage_shape(draw, tensor):
    at = draw(st.integers(0, len(tensor.shape) - 1))
    tensor.shape[at] = draw(int64s.filter(lambda size: size != tensor.shape[at]))


def damage_rank(draw, tensor):
    tensor.shape[:] = draw(
        st.lists(st.integers(0, 5), max_size=4).filter(lambda s: len(s) != len(tensor.shape))
    )


def damage_datatype(draw, tensor):
    tensor.datatype = draw(
        st.one_of(st.sampled_from(["FP64", "INT16", "BYTES"]), st.text(max_size=8)).filter(
            lambda name: name not in DTYPES
        )
    )


def damage_name(draw, tensor):
    tensor.name = draw(st.text(max_size=40).filter(lambda name: name != tensor.name))


def damage_contents(draw, tensor):
    field = draw(st.sampled_from(["bool_contents", "uint_contents", "uint64_contents"]))
    getattr(tensor.contents, field).append(1)


@st.composite
def damaged(draw):
    """A message that was valid but for one part, which can no longer be."""
    message = infer_request(
        request(draw(st.integers(1, 5)), bag=draw(st.integers(1, 3))), typed=draw(st.booleans())
    )
    at = draw(st.integers(0, len(message.inputs) - 1))
    tensor = message.inputs[at]
    kind = draw(st.integers(0, 8))
    damages = [damage_shape, damage_rank, damage_datatype, damage_name, damage_contents]
    if kind < len(damages):
        damages[kind](draw, tensor)
    elif kind == 5:
        del message.inputs[at]
    elif kind == 6 and message.raw_input_contents:
        content = message.raw_input_contents[at]
        message.raw_input_contents[at] = draw(
            st.binary(max_size=60).filter(lambda b: len(b) != len(content))
        )
    elif kind == 6:
        numbers = getattr(tensor.contents, FIELDS[tensor.datatype])
        numbers.extend([1] * draw(st.integers(1, 20)))
    elif kind == 7:
        message.outputs.add(name=draw(st.text(max_size=9).filter(lambda n: n != "default")))
        message.outputs.add(name=message.outputs[0].name)
    else:
        message.parameters["priority"].int64_param = draw(
            int64s.filter(lambda n: not 0 <= n < 2**31 - 1)
        )
    return message.SerializeToString()


contents = st.builds(
    ipb.InferTensorContents,
    fp32_contents=st.lists(st.floats(width=32), max_size=6),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
    int64_contents=st.lists(int64s, max_size=6),
)
random_messages = st.builds(
    ipb.ModelInferRequest,
    model_name=st.sampled_from(["", "m", "other"]),
    id=st.text(max_size=5),
    parameters=st.dictionaries(
        st.sampled_from(["timeout", "priority", "sequence_id", "anything"]), parameters, max_size=2
    ),
    inputs=st.lists(
        st.builds(
            ipb.ModelInferRequest.InferInputTensor,
            name=st.sampled_from([*NAMES, "else"]),
            datatype=st.sampled_from([*DTYPES, "FP64"]),
            shape=st.lists(st.one_of(st.integers(-1, 6), int64s), max_size=3),
            parameters=st.dictionaries(
                st.sampled_from(["shared_memory_region", "x"]), parameters, max_size=1
            ),
            contents=st.one_of(st.none(), contents),
        ),
        max_size=7,
    ),
    outputs=st.lists(
        st.builds(
            ipb.ModelInferRequest.InferRequestedOutputTensor,
            name=st.sampled_from(["default", "pair", "else"]),
        ),
        max_size=3,
    ),
    raw_input_contents=st.lists(st.binary(max_size=50), max_size=7),
).map(lambda message: message.SerializeToString())

fuzzed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzed
@given(content=damaged())
def test_damaged_messages_are_refused(server, content):
    assert outcome(server, content) in ALLOWED
    still_good(server)


@fuzzed
@given(content=random_messages)
def test_random_messages_are_refused_or_valid(server, content):
    assert outcome(server, content) in ALLOWED | {"OK", "DEADLINE_EXCEEDED"}
    still_good(server)


@fuzzed
@given(content=st.binary(max_size=300))
def test_random_bytes_are_refused_or_valid(server, content):
    assert outcome(server, content) in ALLOWED | {"OK"}
    still_good(server)


@fuzzed
@given(content=st.binary(max_size=60))
def test_the_other_calls_take_no_bytes_amiss(server, content):
    for method in ("ModelReady", "ModelConfig", "ModelStatistics", "RepositoryIndex"):
        assert outcome(server, content, method) in ALLOWED | {"OK"}


def test_nothing_of_it_was_a_bug(server):
    metrics = server.metrics()
    assert value(metrics, "tessera_requests_total", code="INTERNAL") == 0
    assert value(metrics, "tessera_queue_requests") == 0
    assert "internal_error" not in server.log.getvalue()
    assert value(metrics, "tessera_rejected_total", reason="invalid") > EXAMPLES
