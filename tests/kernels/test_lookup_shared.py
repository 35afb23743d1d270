"""Bags that several samples share, of all features or of some: looked up once, copied to each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import ops
from tessera.kernels.plan import plan_column
from tessera.kernels.row_types import INT8
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.kernels.cases import calls, random_table


def on(device, *tensors):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


@settings(max_examples=50)
@given(call=calls(), samples=st.integers(0, 20), wide=st.booleans(), seed=st.integers(0, 2**31))
def test_every_sample_gets_its_bags_vectors(device, call, samples, wide, seed):
    features = call.plan.shape[0]
    bags = call.lengths.numel() // features
    samples = samples if bags > 0 else 0
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, max(bags, 1), (samples,), generator=generator)
    arguments = on(device, call.tables.weights, call.plan, call.indices, call.lengths)
    rows, id_weights = on(device, rows if wide else rows.int(), call.id_weights)
    shape = {"dtype": call.dtype, "device": device}
    counts, expected_counts = (
        torch.zeros(features, dtype=torch.int64, device=device) for _ in range(2)
    )
    # The gaps keep what they hold.
    once = torch.full((bags, call.width), 7.0, **shape)
    torch.ops.tessera.lookup_out(*arguments, once, id_weights, expected_counts)
    out = torch.full((samples, call.width), 7.0, **shape)
    torch.ops.tessera.lookup_shared(*arguments, rows, out, id_weights, counts)
    assert torch.equal(out, once[rows.long()])
    assert torch.equal(counts, expected_counts)


def bags_of(call):
    """Per feature, its bags' ids and weights."""
    features = call.plan.shape[0]
    weights = torch.ones(call.indices.numel()) if call.id_weights is None else call.id_weights
    bags = zip(
        call.indices.split(call.lengths.tolist()),
        weights.split(call.lengths.tolist()),
        strict=True,
    )
    each = call.lengths.numel() // features
    found = list(bags)
    return [found[f * each : (f + 1) * each] for f in range(features)]


@settings(max_examples=80)
@given(call=calls(), samples=st.integers(0, 20), wide=st.booleans(), data=st.data())
def test_features_that_are_shared_and_others_in_one_call(call, samples, wide, data):
    features, bags = call.plan.shape[0], bags_of(call)
    count = len(bags[0])
    samples = samples if count > 0 else 0
    draw = data.draw
    shared = draw(st.lists(st.booleans(), max_size=features))
    rows = draw(st.lists(st.integers(0, max(count - 1, 0)), min_size=samples, max_size=samples))
    mixed, repeated = [], []
    for f, own in enumerate(bags):
        spread = [own[row] for row in rows]
        mixed += own if f < len(shared) and shared[f] else spread
        repeated += spread

    def lookup(bags, operator, *more):
        ids = torch.cat([call.indices[:0], *(ids for ids, _ in bags)])
        lengths = torch.tensor([len(ids) for ids, _ in bags], dtype=call.lengths.dtype)
        weights = torch.cat([torch.empty(0), *(weights for _, weights in bags)])
        weights = None if call.id_weights is None else weights
        return operator(call.tables.weights, call.plan, ids, lengths, *more, call.width, weights)

    index = torch.tensor(rows, dtype=torch.int64 if wide else torch.int32)
    flags = torch.tensor(shared, dtype=torch.bool)
    found = lookup(mixed, torch.ops.tessera.lookup_partly_shared, flags, index)
    expected = lookup(repeated, torch.ops.tessera.lookup)
    first = int(call.plan[:, plan_column("out_column")].min())  # columns before it belong to nobody
    assert found.shape == (samples, call.width)
    assert torch.equal(found[:, first:], expected[:, first:])


def test_partly_shared_calls_that_do_not_fit_are_refused():
    packed = pack_tables([random_table(torch.Generator().manual_seed(0), 4, 8, INT8)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=8 * k) for k in range(2)])

    def call(lengths, shared, rows):
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        return torch.ops.tessera.lookup_partly_shared(
            packed.weights, plan, ids, torch.tensor(lengths), torch.tensor(shared), rows, 16
        )

    two = torch.tensor([0, 0])
    assert call([2, 1, 1], [True, False], two).shape == (2, 16)
    with pytest.raises(RuntimeError, match="1 entries do not fit 1 shared features and 1 of 2"):
        call([1], [True, False], two)
    with pytest.raises(RuntimeError, match="5 entries do not fit 2 shared"):
        call([1] * 5, [True, True], two)
    with pytest.raises(RuntimeError, match="3 entries do not fit 0 shared"):
        call([1] * 3, [False, False], two)
    with pytest.raises(RuntimeError, match="entry 1 is 1, but there are 1 bags"):
        call([1, 1, 1], [True, False], torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="bags of nobody"):
        call([1, 1], [True, False], two)
    with pytest.raises(RuntimeError, match="shared: a contiguous bool vector of at most 2"):
        call([1, 1, 1], [True, False, False], two)
    with pytest.raises(RuntimeError, match="shared: a contiguous bool"):
        call([1, 1, 1], [1, 0], two)


def test_a_request_of_one_user_and_many_candidates(device):
    generator = torch.Generator().manual_seed(0)
    packed = pack_tables([random_table(generator, 30, 64, INT8) for _ in range(3)])
    user, item = packed.places[:2], packed.places[2]
    plan = make_plan([FeatureLookup(table=p, out_column=64 * k) for k, p in enumerate(user)])
    item_plan = make_plan([FeatureLookup(table=item, out_column=128)])
    both = torch.cat([plan, item_plan])
    both[:, 14] = torch.arange(3)
    candidates = 200
    user_ids = torch.tensor([3, 4, 5, 6])
    item_ids = torch.randint(0, 30, (candidates,), generator=generator)
    out = torch.empty(candidates, 192, device=device)
    weights, plan, item_plan, both = on(device, packed.weights, plan, item_plan, both)
    torch.ops.tessera.lookup_shared(
        weights,
        plan,
        *on(device, user_ids, torch.tensor([3, 1]), torch.zeros(candidates).int()),
        out,
        launch=ops.launch_hint(plan.cpu()),
    )
    ones = torch.ones(candidates, dtype=torch.int64)
    torch.ops.tessera.lookup_out(weights, item_plan, *on(device, item_ids, ones), out)
    repeated = torch.cat([user_ids[:3].repeat(candidates), user_ids[3:].repeat(candidates)])
    expected = torch.ops.tessera.lookup(
        weights,
        both,
        *on(device, torch.cat([repeated, item_ids]), torch.cat([3 * ones, ones, ones])),
        192,
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ([0, 2], [1, 1], "entry 1 is 2, but there are 2 bags"),
        ([-1, 0], [1, 1], "entry 0 is -1"),
        ([0], [1, 1], "an entry per row of out"),
        ([0.0, 1.0], [1, 1], "int32 or int64"),
        ([0, 0], [], "bags of nobody"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, lengths, message):
    packed = pack_tables([random_table(torch.Generator().manual_seed(0), 4, 8, INT8)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    ids, lengths = torch.zeros(len(lengths)).long(), torch.tensor(lengths, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.lookup_shared(
            packed.weights, plan, ids, lengths, torch.tensor(rows), torch.empty(2, 8)
        )
