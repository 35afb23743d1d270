"""Features that are given once for many samples, against the request that repeats them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.protocol import predictor_pb2 as pb
from tessera.serving.server.config import ModelLimits
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoder import RequestDecoder
from tests.server.server_harness import f32, i32, i64, make_schema

NAMES = ["a", "b", "c"]


def decode(message, *, shares_rows=False, **limits):
    decoder = RequestDecoder(make_schema(), ModelLimits(**limits), shares_rows=shares_rows)
    return decoder.decode(message)


def empty_request(B):
    message = pb.PredictionRequest(batch_size=B)
    message.float_features.num_features = 2
    message.float_features.values = f32(np.zeros(2 * B))
    message.id_score_list_features.num_features = 1
    message.id_score_list_features.lengths = i32([0] * B)
    return message


def fill(group, bags, *, wide=False):
    """``bags``: per feature, per row, a list of ids."""
    flat = [bag for feature in bags for bag in feature]
    numbers = [number for bag in flat for number in bag]
    group.num_features = len(bags)
    group.lengths = i32([len(bag) for bag in flat])
    if wide:
        group.values_int64 = i64(numbers)
    else:
        group.values = i32(numbers)


bag = st.lists(st.integers(0, 9), max_size=4)


@st.composite
def ranking_requests(draw):
    B, R = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    shared = draw(st.permutations(NAMES).flatmap(lambda p: st.integers(1, 3).map(lambda n: p[:n])))
    rows = {name: draw(st.lists(bag, min_size=R, max_size=R)) for name in shared}
    own = {
        name: draw(st.lists(bag, min_size=B, max_size=B)) for name in NAMES if name not in shared
    }
    row_index = draw(st.lists(st.integers(0, R - 1), min_size=B, max_size=B))
    return B, R, shared, rows, own, row_index, draw(st.booleans()), draw(st.booleans())


def messages(drawn):
    """A drawn request as it is sent once, and as every sample repeats what is shared."""
    B, R, shared, rows, own, row_index, own_wide, shared_wide = drawn
    message = empty_request(B)
    fill(message.id_list_features, list(own.values()), wide=own_wide)
    message.shared_features.names.extend(shared)
    message.shared_features.num_rows = R
    fill(message.shared_features.features, [rows[name] for name in shared], wide=shared_wide)
    message.shared_features.row_index = i32(row_index)

    repeated = empty_request(B)
    full = [own[n] if n in own else [rows[n][r] for r in row_index] for n in NAMES]
    fill(repeated.id_list_features, full)
    return message, repeated


@given(ranking_requests())
def test_spread_equals_the_request_that_repeats(drawn):
    message, repeated = messages(drawn)
    spread, plain = decode(message), decode(repeated)
    assert spread.shared is None
    np.testing.assert_array_equal(spread.id_list.lengths, plain.id_list.lengths)
    np.testing.assert_array_equal(spread.id_list.values, plain.id_list.values)
    assert spread.ids == plain.ids


@given(ranking_requests())
def test_joined_has_every_bag_once_and_in_the_schemas_order(drawn):
    _, R, shared, rows, own, row_index, *_ = drawn
    joined = decode(messages(drawn)[0], shares_rows=True)
    bags = [bag for name in NAMES for bag in (rows[name] if name in shared else own[name])]
    assert joined.id_list.lengths.tolist() == [len(bag) for bag in bags]
    assert joined.id_list.values.tolist() == [number for bag in bags for number in bag]
    assert joined.ids == joined.id_list.values.size
    assert joined.shared.features == tuple(sorted(NAMES.index(name) for name in shared))
    assert joined.shared.rows == R
    assert joined.shared.index.tolist() == row_index


def ranking_request(B=3):
    message = empty_request(B)
    fill(message.id_list_features, [[[1]] * B, [[2]] * B])
    message.shared_features.names.append("b")
    message.shared_features.num_rows = 1
    fill(message.shared_features.features, [[[7, 8]]])
    message.shared_features.row_index = i32([0] * B)
    return message


def test_a_ranking_request_is_understood():
    assert decode(ranking_request()).id_list.values.tolist() == [1] * 3 + [7, 8] * 3 + [2] * 3
    joined = decode(ranking_request(), shares_rows=True)
    assert joined.id_list.values.tolist() == [1] * 3 + [7, 8] + [2] * 3
    assert joined.id_list.lengths.tolist() == [1] * 3 + [2] + [1] * 3
    assert joined.ids == 8


def shared_weights(m):
    m.features.weights = b"\0" * 4


REFUSED = [
    (lambda m: m.ClearField("names"), "shared_features.names has 0 names"),
    (lambda m: m.names.extend("bbb"), "has 4 names, the model has only 3 id_list features"),
    (lambda m: m.names.append("b"), "shared_features.names has 2 names of which 1 differ"),
    (
        lambda m: m.names.append("w"),
        "shared_features.names has 'w', which is not an id_list feature",
    ),
    (lambda m: m.names.append("zzz"), "shared_features.names has 'zzz'"),
    (lambda m: setattr(m, "num_rows", 0), "shared_features.num_rows is 0, expected at least 1"),
    (lambda m: setattr(m, "num_rows", -1), "shared_features.num_rows is -1"),
    (
        lambda m: setattr(m, "num_rows", 2),
        "shared_features.features.lengths has 4 bytes, expected 8",
    ),
    (
        lambda m: setattr(m, "num_rows", 16_384),
        "shared_features.features.lengths has 4 bytes, expected 65536",
    ),
    (
        lambda m: setattr(m, "num_rows", 16_385),
        "shared_features.num_rows is 16385, the limit is 16384 rows",
    ),
    (
        lambda m: setattr(m.features, "num_features", 2),
        "shared_features.features.num_features is 2, expected 1",
    ),
    (shared_weights, "shared_features.features.weights has 4 bytes, expected 0"),
    (
        lambda m: setattr(m, "row_index", i32([0, 0])),
        r"shared_features.row_index has 8 bytes, expected 12 \(batch_size = 3",
    ),
    (
        lambda m: setattr(m, "row_index", i32([0, 1, 0])),
        r"shared_features.row_index\[1\] is 1, expected \[0, 1\)",
    ),
    (lambda m: setattr(m, "row_index", i32([0, 0, -1])), r"row_index\[2\] is -1"),
    (
        lambda m: setattr(m.features, "lengths", i32([-2])),
        r"shared_features.features.lengths\[0\] is -2",
    ),
]


@pytest.mark.parametrize("shares_rows", [False, True])
@pytest.mark.parametrize(("edit", "text"), REFUSED)
def test_refused_with_the_field_and_both_numbers(edit, text, shares_rows):
    message = ranking_request()
    edit(message.shared_features)
    with pytest.raises(InvalidRequestError, match=text):
        decode(message, shares_rows=shares_rows)


def test_own_features_must_be_the_others():
    message = ranking_request()
    fill(message.id_list_features, [[[1]] * 3] * 3)
    with pytest.raises(
        InvalidRequestError, match=r"id_list_features.num_features is 3, expected 2"
    ):
        decode(message)


@pytest.mark.parametrize("shares_rows", [False, True])
def test_reject_rule_names_the_shared_row(shares_rows):
    message = empty_request(2)
    fill(message.id_list_features, [[[1]] * 2, [[2]] * 2])
    message.shared_features.names.append("a")
    message.shared_features.num_rows = 2
    fill(message.shared_features.features, [[[5], [6, 100]]])
    message.shared_features.row_index = i32([1, 0])
    text = r"^shared_features.features: feature 'a', row 1: id 100 is outside \[0, 100\)"
    with pytest.raises(InvalidRequestError, match=text):
        decode(message, shares_rows=shares_rows)
    fill(message.shared_features.features, [[[5], [6]]])
    fill(message.id_list_features, [[[1]] * 2, [[2]] * 2])
    assert decode(message, shares_rows=shares_rows).samples == 2


def test_few_bytes_cannot_ask_for_many_ids():
    B = 10_000
    message = empty_request(B)
    fill(message.id_list_features, [[[]] * B] * 2)
    message.shared_features.names.append("b")
    message.shared_features.num_rows = 1
    fill(message.shared_features.features, [[[1] * 10_000]])
    message.shared_features.row_index = i32([0] * B)
    with pytest.raises(InvalidRequestError, match="has 100000000 ids, the limit is 4194304"):
        decode(message)
    # What is looked up once counts once.
    assert decode(message, shares_rows=True).ids == 10_000
    with pytest.raises(InvalidRequestError, match="has 10000 ids, the limit is 9999"):
        decode(message, shares_rows=True, max_request_ids=9_999)
