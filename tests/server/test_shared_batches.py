"""Requests that share rows, merged, cut and queued: against the same requests that repeat them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.serving.server.batching.merger import Merger, merge_slowly
from tessera.serving.server.batching.parts import cut_request
from tessera.serving.server.batching.request_queue import Part, RequestQueue
from tessera.serving.server.request.decoded_request import DecodedRequest, JaggedGroup, SharedRows
from tests.server.server_harness import feature, make_schema

FEATURES = 4
SCHEMA = make_schema(
    features=(
        *(feature(name, rows=40, out_of_range="clamp") for name in "abcd"),
        feature("w", "id_score_list"),
    )
)


def group_of(bags, weights=None):
    """Bags in their order as a group."""
    values = np.array([number for bag in bags for number in bag], np.int64)
    return JaggedGroup(np.array([len(bag) for bag in bags], np.int32), values, weights)


def make_request(rng, B, R, features, *, max_bag):
    """Its form with shared rows (``features`` empty: it shares nothing), and its repeating form."""

    def bag():
        return rng.integers(-3, 50, rng.integers(0, max_bag + 1)).tolist()

    index = rng.integers(0, R, B).astype(np.int32)
    once, repeated = [], []
    for f in range(FEATURES):
        own = [bag() for _ in range(R if f in features else B)]
        once += own
        repeated += [own[row] for row in index] if f in features else own
    scored = group_of([bag() for _ in range(B)])
    scored.weights = rng.random(scored.values.size).astype(np.float32)
    dense = rng.random(2 * B).astype(np.float32)

    def request(bags, shared):
        plain = group_of(bags)
        ids = plain.values.size + scored.values.size
        return DecodedRequest(B, ids, dense, plain, scored, shared)

    shared = SharedRows(features, R, index) if features else None
    return request(once, shared), request(repeated, None)


features = st.sets(st.integers(0, FEATURES - 1), min_size=1).map(lambda f: tuple(sorted(f)))
shapes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans())
batches = st.tuples(
    features, st.lists(shapes, min_size=1, max_size=6), st.integers(0, 5), st.integers(0, 2**32 - 1)
)


def draw(drawn):
    shared, requests, max_bag, seed = drawn
    rng = np.random.default_rng(seed)
    return [
        make_request(rng, B, R, shared if shares else (), max_bag=max_bag)
        for B, R, shares in requests
    ]


def spread(batch):
    """The ids of a merged batch with every sample's own copy, in loops."""
    group, at = batch.id_list, 0
    bags = []
    for length in group.lengths.tolist():
        bags.append(group.values[at : at + length].tolist())
        at += length
    assert at == group.values.size
    if batch.shared is None:
        return bags
    R = (len(bags) - batch.samples * int((~batch.shared).sum())) // int(batch.shared.sum())
    found, begin = [], 0
    for shared in batch.shared.tolist():
        own = bags[begin : begin + (R if shared else batch.samples)]
        begin += len(own)
        found += [own[row] for row in batch.row_index] if shared else own
    assert begin == len(bags)
    return found


def check(merger, pairs):
    batch = merger.merge([once for once, _ in pairs])
    repeated = [request for _, request in pairs]
    slow = merge_slowly([r.id_list for r in repeated], [r.samples for r in repeated], FEATURES)
    bags = spread(batch)
    assert [len(bag) for bag in bags] == slow.lengths.tolist()
    assert [number for bag in bags for number in bag] == slow.values.tolist()
    plain = Merger(SCHEMA).merge(repeated)
    np.testing.assert_array_equal(batch.id_score_list.values, plain.id_score_list.values)
    np.testing.assert_array_equal(batch.id_score_list.weights, plain.id_score_list.weights)
    np.testing.assert_array_equal(batch.dense, plain.dense)
    assert batch.ids == sum(once.ids for once, _ in pairs)
    outside = batch.id_list.values
    assert batch.out_of_range_ids == int(((outside < 0) | (outside >= 40)).sum())
    return batch


@given(batches, batches)
def test_a_mixed_batch_is_the_batch_that_repeats(first, second):
    merger = Merger(SCHEMA)
    for drawn in (first, second):  # the second in memory that is used again
        pairs = draw(drawn)
        batch = check(merger, pairs)
        if any(once.shared for once, _ in pairs):
            assert batch.row_index.dtype == np.int32
            assert np.flatnonzero(batch.shared).tolist() == list(drawn[0])
        else:
            assert batch.shared is None


def own_ids(part):
    """Ids that the samples of a part do not share."""
    own, at = part.id_score_list.values.size, 0
    for place in range(len(SCHEMA.group("id_list"))):
        is_shared = part.shared is not None and place in part.shared.features
        bags = part.shared.rows if is_shared else part.samples
        own += 0 if is_shared else part.id_list.lengths[at : at + bags].sum()
        at += bags
    assert at == part.id_list.lengths.size
    return own


@given(batches, st.integers(1, 4), st.integers(1, 30))
def test_parts_hold_the_limits_and_are_the_request(drawn, max_samples, max_ids):
    for once, repeated in draw(drawn):
        parts = cut_request(once, SCHEMA, max_samples=max_samples, max_ids=max_ids)
        assert sum(part.samples for part in parts) == once.samples
        for part in parts:
            assert part.samples <= max_samples
            assert part.samples == 1 or part.ids <= max_ids or own_ids(part) <= max_ids // 2
            assert part.ids == part.id_list.values.size + part.id_score_list.values.size
            if part.shared is not None and len(parts) > 1:
                assert part.shared.index.min() == 0
                assert part.shared.index.max() == part.shared.rows - 1
        # Neighbouring parts of one request are as good as several requests.
        batch = Merger(SCHEMA).merge(parts)
        plain = Merger(SCHEMA).merge([repeated])
        bags = spread(batch)
        assert [len(bag) for bag in bags] == plain.id_list.lengths.tolist()
        assert [number for bag in bags for number in bag] == plain.id_list.values.tolist()
        np.testing.assert_array_equal(batch.id_score_list.values, plain.id_score_list.values)
        np.testing.assert_array_equal(batch.dense, plain.dense)


@pytest.mark.parametrize(
    ("users", "shared_ids", "samples"),
    [
        (1, 10, [90, 90, 20]),
        (1, 50, [50, 50, 50, 50]),
        (1, 900, [50, 50, 50, 50]),
        (2, 40, [50, 50, 50, 50]),
        # Six of 61 ids are as many as the request has, which is 320.
        (2, 60, [1, 1, 1, 1, 1, 1, 50, 50, 50, 44]),
    ],
)
def test_many_shared_ids_are_not_looked_up_for_every_sample_anew(users, shared_ids, samples):
    B, F = 200, len(SCHEMA.group("id_list"))
    lengths = np.concatenate(
        [np.full(users, shared_ids), np.ones(B), np.zeros((F - 2) * B)],
        dtype=np.int32,
        casting="unsafe",
    )
    request = DecodedRequest(
        samples=B,
        ids=int(lengths.sum()),
        dense=np.zeros(B * len(SCHEMA.dense_features), dtype=np.float32),
        id_list=JaggedGroup(lengths, np.ones(lengths.sum(), dtype=np.int64), None),
        id_score_list=JaggedGroup(
            np.zeros(len(SCHEMA.group("id_score_list")) * B, dtype=np.int32),
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.float32),
        ),
        shared=SharedRows((0,), users, np.arange(B, dtype=np.int32) % users),
    )
    parts = cut_request(request, SCHEMA, max_samples=1_000, max_ids=100)
    assert [part.samples for part in parts] == samples
    assert [part.ids for part in parts] == [
        count + min(count, users) * shared_ids for count in samples
    ]


def test_a_request_that_fits_is_not_cut():
    rng = np.random.default_rng(0)
    once, _ = make_request(rng, 5, 1, (0, 2), max_bag=3)
    assert cut_request(once, SCHEMA, max_samples=5, max_ids=1_000) == [once]


class NoOwner:
    def is_done(self):
        return False


def test_a_batch_has_one_set_of_shared_features():
    rng = np.random.default_rng(0)
    sets = [(), (0, 1), (), (0, 1), (2,), (), (0, 1)]
    queue = RequestQueue(max_requests=10, max_samples=100)
    for number, shared in enumerate(sets):
        once, _ = make_request(rng, 2, 1, shared, max_bag=2)
        queue.push([Part(once, NoOwner(), number, True, 0.0)], 0.0)
    cuts = []
    while len(queue):
        cut = queue.cut(max_samples=100, max_ids=1_000, now=1.0)
        cuts.append([part.index for part in cut.parts])
    assert cuts == [[0, 1, 2, 3], [4, 5], [6]]
