"""The vectorised merge and the cutting of large requests, against plain loops."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.server.batching.merger import Merger, merge_slowly
from tessera.serving.server.batching.parts import cut_request, join_outputs
from tessera.serving.server.request.decoded_request import DecodedRequest, JaggedGroup
from tests.server.server_harness import feature, make_schema

SCHEMAS = {
    "both groups": make_schema(),
    "one group": make_schema(features=(feature("a"), feature("b"))),
    "weighted only": make_schema(features=(feature("w", "id_score_list"),)),
    "dense only": make_schema(features=()),
    "sparse only": make_schema(dense=0),
}


def make_request(schema, B, rng, *, max_bag, wide):
    def group(name):
        F = len(schema.group(name))
        lengths = rng.integers(0, max_bag + 1, F * B).astype(np.int32)
        kind = np.int64 if wide else np.int32
        values = rng.integers(-(2**31), 2**31, lengths.sum()).astype(kind)
        weights = rng.random(values.size).astype(np.float32) if name != "id_list" else None
        return JaggedGroup(lengths, values, weights)

    plain, scored = group("id_list"), group("id_score_list")
    dense = rng.random(B * len(schema.dense_features)).astype(np.float32)
    return DecodedRequest(B, plain.values.size + scored.values.size, dense, plain, scored)


requests = st.tuples(
    st.sampled_from(sorted(SCHEMAS)),
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 4),
    st.integers(0, 2**32 - 1),
)


def draw(drawn):
    name, shapes, max_bag, seed = drawn
    schema, rng = SCHEMAS[name], np.random.default_rng(seed)
    made = [make_request(schema, B, rng, max_bag=max_bag, wide=wide) for B, wide in shapes]
    return schema, made


def check_group(merged, groups, samples, F):
    slow = merge_slowly(groups, samples, F)
    np.testing.assert_array_equal(merged.lengths, slow.lengths)
    np.testing.assert_array_equal(merged.values, slow.values)
    np.testing.assert_array_equal(merged.weights, slow.weights)
    assert merged.values.dtype == np.int64


def check(merger, schema, made):
    batch = merger.merge(made)
    samples = [request.samples for request in made]
    assert batch.samples == sum(samples)
    assert batch.ids == sum(request.ids for request in made)
    np.testing.assert_array_equal(
        batch.dense.ravel(), np.concatenate([request.dense for request in made])
    )
    F = len(schema.group("id_list"))
    check_group(batch.id_list, [r.id_list for r in made], samples, F)
    F = len(schema.group("id_score_list"))
    check_group(batch.id_score_list, [r.id_score_list for r in made], samples, F)


@given(requests)
def test_merge_equals_the_loops(drawn):
    schema, made = draw(drawn)
    check(Merger(schema), schema, made)


@given(requests, requests)
def test_memory_used_again_keeps_nothing_of_the_last_batch(first, second):
    schema, made = draw(first)
    _, more = draw((first[0], *second[1:]))
    merger = Merger(schema)
    merger.merge(made)
    check(merger, schema, more)


def test_what_the_operators_write_does_not_reach_the_request():
    schema = make_schema(features=(feature("a"),))
    made = make_request(schema, 3, np.random.default_rng(0), max_bag=4, wide=True)
    before = made.id_list.values.copy()
    Merger(schema).merge([made]).id_list.values[:] = 0
    np.testing.assert_array_equal(made.id_list.values, before)


def test_buffers_grow_once_and_are_reported():
    schema = make_schema()
    merger = Merger(schema)
    rng = np.random.default_rng(0)
    small = merger.nbytes()
    large = [make_request(schema, 64, rng, max_bag=20, wide=False) for _ in range(8)]
    merger.merge(large)
    grown = merger.nbytes()
    merger.merge(large[:1])
    assert merger.nbytes() == grown > small


def test_counts_ids_outside_clamped_and_hashed_tables_only():
    schema = make_schema(
        features=(
            feature("reject", rows=5),
            feature("clamp", rows=5, out_of_range="clamp"),
            feature("hash", rows=5, out_of_range="hash"),
            feature("murmur", rows=5, hashing="murmur3", out_of_range="clamp"),
            feature("w", "id_score_list", rows=5, out_of_range="clamp"),
        )
    )
    ids = np.array([4, 0, -1, 5, 4, 2**40, 3, 99, -99], np.int64)
    plain = JaggedGroup(np.array([1, 4, 2, 2], np.int32), ids, None)
    scored = JaggedGroup(np.array([2], np.int32), np.array([-5, 1]), np.ones(2, np.float32))
    request = DecodedRequest(1, 11, np.zeros(2, np.float32), plain, scored)
    # clamp: -1 and 5; hash: 2**40; w: -5.  murmur3 has no ids outside.
    assert Merger(schema).merge([request]).out_of_range_ids == 4
    assert Merger(schema).merge([request, request]).out_of_range_ids == 8


@given(requests, st.integers(1, 8), st.integers(1, 20))
def test_parts_hold_the_limits_and_merge_into_the_whole(drawn, max_samples, max_ids):
    schema, made = draw(drawn)
    whole = made[0]
    parts = cut_request(whole, schema, max_samples=max_samples, max_ids=max_ids)
    assert sum(part.samples for part in parts) == whole.samples
    for part in parts:
        assert part.samples <= max_samples
        assert part.ids <= max_ids or part.samples == 1
    # Merging parts in order must give the request again, feature by feature.
    merged, copied = Merger(schema).merge(parts), Merger(schema).merge([whole])
    np.testing.assert_array_equal(merged.dense, copied.dense)
    for group in ("id_list", "id_score_list"):
        for field in ("lengths", "values", "weights"):
            np.testing.assert_array_equal(
                getattr(getattr(merged, group), field), getattr(getattr(copied, group), field)
            )


def test_a_request_that_fits_is_not_touched():
    schema = make_schema()
    whole = make_request(schema, 4, np.random.default_rng(0), max_bag=2, wide=False)
    assert cut_request(whole, schema, max_samples=4, max_ids=10_000) == [whole]


def test_outputs_are_joined_in_order():
    parts = [{"a": b"12", "b": b"x"}, {"a": b"3", "b": b"y"}]
    assert join_outputs(parts) == {"a": b"123", "b": b"xy"}
