"""ModelInferRequests to the arrays that Predict's requests become."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import Code, InvalidRequestError, RejectReason
from tessera.serving.server.request.decoder import RequestDecoder
from tessera.serving.server.request.infer_decoder import InferDecoder, inputs_of
from tessera.serving.server.request.infer_regions import RequestRegions
from tests.kserve_messages import infer_request
from tests.server.server_harness import feature, i32, i64, make_schema, random_request, request

LIMITS = ModelLimits(max_request_samples=100, max_request_ids=500)
SCHEMA = make_schema()


def decode(message, schema=SCHEMA):
    # Through the wire, as the server gets it.
    message = ipb.ModelInferRequest.FromString(message.SerializeToString())
    return InferDecoder(schema, LIMITS).decode(message, RequestRegions(None))


def refusal(message, schema=SCHEMA):
    with pytest.raises(InvalidRequestError) as caught:
        decode(message, schema)
    assert (caught.value.code, caught.value.reason) == (Code.INVALID_ARGUMENT, RejectReason.INVALID)
    return caught.value.message


def hold(found, wanted):
    assert (found.samples, found.ids, found.shared) == (wanted.samples, wanted.ids, None)
    np.testing.assert_array_equal(found.dense, wanted.dense)
    for group in ("id_list", "id_score_list"):
        one, two = getattr(found, group), getattr(wanted, group)
        np.testing.assert_array_equal(one.lengths, two.lengths)
        np.testing.assert_array_equal(one.values, two.values)
        assert one.lengths.dtype == two.lengths.dtype
        if group == "id_score_list":
            np.testing.assert_array_equal(one.weights, two.weights)


@given(
    st.integers(0, 2**32),
    st.integers(1, 20),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
def test_arrays_are_those_of_predict(seed, B, max_bag, wide, typed):
    rng = np.random.default_rng(seed)
    message = random_request(rng, B, max_bag=max_bag, wide=wide)
    found = decode(infer_request(message, typed=typed))
    hold(found.request, RequestDecoder(SCHEMA, LIMITS).decode(message))
    assert (found.priority, found.timeout_s, found.outputs) == (0, math.inf, None)


def test_arrays_are_views_of_the_message():
    found = decode(infer_request(request(3))).request
    assert not found.dense.flags.owndata
    assert not found.id_list.values.flags.owndata


DENSE_ONLY = make_schema(features=())
PLAIN_ONLY = make_schema(dense=0, features=(feature("a"), feature("b")))
SCORED_ONLY = make_schema(dense=0, features=(feature("w", "id_score_list", rows=50),))


def tensors(*parts):
    message = ipb.ModelInferRequest()
    for name, datatype, shape, content in parts:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(content)
    return message


def plain(lengths, values, datatype="INT64"):
    return [
        ("id_list_features_lengths", "INT32", [len(lengths)], i32(lengths)),
        ("id_list_features_values", datatype, [len(values)], i64(values)),
    ]


def test_samples_are_known_without_dense_values():
    found = decode(tensors(*plain([1, 0, 2, 0], [3, 4, 5])), PLAIN_ONLY).request
    assert (found.samples, found.ids) == (2, 3)
    message = tensors(
        ("id_score_list_features_lengths", "INT32", [3], i32([0, 1, 0])),
        ("id_score_list_features_values", "INT32", [1], i32([7])),
        ("id_score_list_features_weights", "FP32", [1], b"\0\0\0\0"),
    )
    assert decode(message, SCORED_ONLY).request.samples == 3


def test_lengths_that_are_no_whole_number_of_samples():
    assert refusal(tensors(*plain([1, 0, 0], [3])), PLAIN_ONLY) == (
        "id_list_features_lengths has 3 elements, expected a multiple of 2 features"
    )


def test_groups_that_the_model_has_not():
    dense = ("float_features", "FP32", [1, 2], b"\0" * 8)
    assert decode(tensors(dense, *plain([], [])), DENSE_ONLY).request.samples == 1
    assert refusal(tensors(dense, *plain([1], [])), DENSE_ONLY) == (
        "id_list_features_lengths has 1 elements, expected 0: the model has no id_list_features"
    )
    assert refusal(tensors(dense, *plain([0, 0], [])), PLAIN_ONLY) == (
        "float_features has 2 elements, expected 0: the model has no float_features"
    )
    nothing = ("float_features", "FP32", [2**31 - 1, 0], b"")
    assert decode(tensors(nothing, *plain([0, 0], [])), PLAIN_ONLY).request.samples == 1


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (DENSE_ONLY, ["float_features"]),
        (PLAIN_ONLY, ["id_list_features_lengths", "id_list_features_values"]),
        (
            SCORED_ONLY,
            [
                "id_score_list_features_lengths",
                "id_score_list_features_values",
                "id_score_list_features_weights",
            ],
        ),
    ],
)
def test_inputs_are_those_of_the_model_s_groups(schema, names):
    assert [tensor.name for tensor in inputs_of(schema)] == names


@pytest.mark.parametrize(
    ("given_priority", "queue_priority"),
    [(0, 0), (1, 2**31 - 2), (2, 2**31 - 3), (2**31 - 2, 1)],
)
def test_lower_priorities_come_first(given_priority, queue_priority):
    for field in ("int64_param", "uint64_param"):
        message = infer_request(request())
        setattr(message.parameters["priority"], field, given_priority)
        assert decode(message).priority == queue_priority


def test_timeouts():
    for micros, seconds in [(1, 1e-6), (2_500_000, 2.5), (2**63 - 1, (2**63 - 1) / 1e6)]:
        message = infer_request(request())
        message.parameters["timeout"].uint64_param = micros
        assert decode(message).timeout_s == seconds
    message.parameters["timeout"].uint64_param = 2**63
    assert refusal(message) == (
        "parameter 'timeout' is 9223372036854775808, expected 0 to 9223372036854775807"
    )


@pytest.mark.parametrize("kind", ["bool_param", "double_param"])
def test_a_sequence_of_another_kind(kind):
    message = infer_request(request())
    setattr(message.parameters["sequence_id"], kind, 0)
    assert "'sequence_id' is not supported" in refusal(message)
    message.parameters["sequence_id"].string_param = ""
    decode(message)


def test_asked_outputs():
    message = infer_request(request())
    for name in ("pair", "default"):
        message.outputs.add(name=name)
    assert decode(message).outputs == ["pair", "default"]


def test_many_outputs_are_refused_by_the_first_that_comes_again():
    message = infer_request(request())
    message.outputs.extend(
        [ipb.ModelInferRequest.InferRequestedOutputTensor(name="pair")] * 100_000
    )
    assert refusal(message) == "output 'pair' is asked for twice"
