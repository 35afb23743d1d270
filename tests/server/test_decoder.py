import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import Code, InvalidRequestError, RejectReason
from tessera.serving.server.request.decoder import RequestDecoder
from tests.server.server_harness import f32, feature, i32, i64, make_schema, random_request, request

LIMITS = ModelLimits(max_request_samples=100, max_request_ids=500)


def decode(message, schema=None):
    # Through the wire, as the server gets it.
    message = pb.PredictionRequest.FromString(message.SerializeToString())
    return RequestDecoder(schema or make_schema(), LIMITS).decode(message)


def edited(edit, B=2):
    message = request(B)
    edit(message)
    return message


def set_dense(*numbers):
    def edit(message):
        message.float_features.values = f32(numbers)

    return edit


def setting(path, value):
    """An edit that sets the field at the dotted ``path``."""

    def edit(message):
        *groups, last = path.split(".")
        for group in groups:
            message = getattr(message, group)
        setattr(message, last, value)

    return edit


def both_value_fields(message):
    message.id_list_features.values_int64 = i64([0] * 6)


def ids(*numbers):
    return setting("id_list_features.values", i32(numbers))


REFUSED = [
    (setting("batch_size", 0), "batch_size is 0, expected at least 1"),
    (setting("batch_size", -3), "batch_size is -3, expected at least 1"),
    (setting("batch_size", 101), "batch_size is 101, the limit is 100"),
    (
        setting("float_features.num_features", 3),
        "float_features.num_features is 3, the model has 2",
    ),
    (
        setting("float_features.values", b"\0" * 15),
        r"float_features.values has 15 bytes, expected 16 \(batch_size \* num_features = 4",
    ),
    (
        set_dense(0, 0, np.inf, 0),
        "float_features.values: feature 'd0', row 1 is inf, expected only NaN",
    ),
    (set_dense(0, -np.inf, 0, 0), "feature 'd1', row 0 is -inf"),
    (setting("id_list_features.num_features", 2), "id_list_features.num_features is 2, expected 3"),
    (
        setting("id_list_features.lengths", i32([1] * 5)),
        r"id_list_features.lengths has 20 bytes, expected 24 \(num_features \* batch_size = 6",
    ),
    (setting("id_list_features.lengths", b"\0" * 23), "lengths has 23 bytes, expected 24"),
    (
        setting("id_list_features.lengths", i32([1, 1, -1, 3, 1, 1])),
        r"id_list_features.lengths\[2\] is -1, expected >= 0",
    ),
    (
        setting("id_list_features.lengths", i32([1, 1, 1, 1, 1, 2])),
        r"id_list_features.values has 24 bytes, expected 28 \(sum\(lengths\) = 7",
    ),
    (
        setting("id_list_features.lengths", i32([2**31 - 1] * 6)),
        "id_list_features.values has 24 bytes, expected 51539607528",
    ),
    (setting("id_list_features.values", b"\0" * 25), "values has 25 bytes, expected 24"),
    (setting("id_list_features.values", b"\0" * 47), "values has 47 bytes, expected 24"),
    (
        setting("id_list_features.values", i64([0, 1 << 32, 0, 0, 0, 0])),
        r"id_list_features: feature 'a', row 1: id 4294967296 is outside \[0, 100\)",
    ),
    (both_value_fields, "24 bytes of values and 48 bytes of values_int64, expected only one"),
    (
        setting("id_list_features.weights", f32([1] * 6)),
        "id_list_features.weights has 24 bytes, expected 0",
    ),
    (
        setting("id_score_list_features.weights", f32([1])),
        r"id_score_list_features.weights has 4 bytes, expected 8 \(sum\(lengths\) = 2",
    ),
    (
        setting("id_score_list_features.weights", f32([1, np.nan])),
        r"id_score_list_features.weights\[1\] is nan, expected a finite number",
    ),
    (
        ids(0, 100, 0, 0, 0, 0),
        r"id_list_features: feature 'a', row 1: id 100 is outside \[0, 100\)",
    ),
    (ids(-1, 0, 0, 0, 0, 0), r"feature 'a', row 0: id -1 is outside \[0, 100\)"),
    (
        setting("id_score_list_features.values", i32([0, 50])),
        r"id_score_list_features: feature 'w', row 1: id 50 is outside \[0, 50\)",
    ),
    (setting("embedding_features.num_features", 1), "embedding_features has 2 bytes"),
    (setting("unary_features.lengths", b"\0" * 4), "unary_features has 6 bytes"),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED)
def test_refused_with_the_field_and_both_numbers(edit, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        decode(edited(edit))
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.reason is RejectReason.INVALID


def test_too_many_ids():
    with pytest.raises(InvalidRequestError, match="has 600 ids, the limit is 500"):
        decode(request(2, bag=75))


@pytest.mark.parametrize("id_value", [-(2**63), -1, 100, 2**63 - 1])
def test_reject_rule_sees_the_whole_of_an_int64(id_value):
    message = request(1)
    message.id_list_features.ClearField("values")
    message.id_list_features.values_int64 = i64([id_value, 0, 0])
    with pytest.raises(InvalidRequestError, match=rf"feature 'a', row 0: id {id_value} is outside"):
        decode(message)


@pytest.mark.parametrize("id_value", [-(2**63), -1, 10, 2**63 - 1])
@pytest.mark.parametrize("position", [1, 2])
def test_hashed_and_clamped_features_take_every_id(position, id_value):
    numbers = [0, 0, 0]
    numbers[position] = id_value
    message = request(1)
    message.id_list_features.ClearField("values")
    message.id_list_features.values_int64 = i64(numbers)
    assert decode(message).id_list.values.tolist() == numbers


def test_nan_is_missing_or_refused_as_the_schema_says():
    message = edited(set_dense(0, np.nan, 1, 2))
    assert np.isnan(decode(message).dense[1])
    with pytest.raises(InvalidRequestError, match="feature 'd1', row 0 is nan, expected a finite"):
        decode(message, make_schema(missing="refuse"))


def test_large_finite_numbers_pass():
    message = edited(set_dense(3e38, -3e38, 1, 2))
    assert decode(message, make_schema(missing="refuse")).dense[0] == np.float32(3e38)
    message.id_score_list_features.weights = f32([3e38, 1])
    assert decode(message).id_score_list.weights[0] == np.float32(3e38)


def test_eight_bytes_for_each_id_are_int64_whichever_field_they_are_in():
    wide = [0, 1, -(1 << 40), 3, 1 << 62, 5]
    decoded = decode(edited(setting("id_list_features.values", i64(wide))))
    assert decoded.id_list.values.tolist() == wide
    decoded = decode(edited(setting("id_score_list_features.values", i64([7, 8]))))
    assert decoded.id_score_list.values.tolist() == [7, 8]


def test_a_group_without_features_may_be_absent_or_empty():
    schema = make_schema(features=(feature("a"),))
    message = request(2)
    message.ClearField("id_score_list_features")
    message.id_list_features.num_features = 1
    message.id_list_features.lengths = i32([1, 0])
    message.id_list_features.values = i32([7])
    assert decode(message, schema).id_score_list.values.size == 0
    message.id_score_list_features.num_features = 0
    message.embedding_features.num_features = 0
    message.unary_features.num_features = 0
    assert decode(message, schema).ids == 1
    message.id_score_list_features.weights = b"\0" * 4
    with pytest.raises(InvalidRequestError, match=r"weights has 4 bytes, expected 0: num_feat"):
        decode(message, schema)


@given(st.integers(1, 20), st.booleans(), st.integers(0, 2**32 - 1))
def test_a_valid_request_is_understood(B, wide, seed):
    message = random_request(np.random.default_rng(seed), B, max_bag=4, wide=wide)
    decoded = decode(message)
    assert decoded.samples == B
    assert decoded.dense.tobytes() == message.float_features.values
    for group, sent in (
        (decoded.id_list, message.id_list_features),
        (decoded.id_score_list, message.id_score_list_features),
    ):
        assert group.lengths.tobytes() == sent.lengths
        assert group.values.tobytes() == (sent.values_int64 or sent.values)
    assert decoded.id_score_list.weights.tobytes() == message.id_score_list_features.weights
    assert decoded.ids == decoded.id_list.values.size + decoded.id_score_list.values.size
