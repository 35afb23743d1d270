"""DLRM's interaction on every device, alone and behind a lookup."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import ops, reference
from tessera.kernels.plan import IdRule, OutOfRange, Pooling, plan_column
from tessera.kernels.row_types import BLOCK_INT8, FLOAT16, INT8
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.kernels.cases import calls, random_table


def on(device, *tensors):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def near(ours, dense, sparse, upper):
    """Whether dot products of D columns are as exact as float32 sums of D products are."""
    expected = reference.dot_interaction(dense, sparse, upper=upper)
    magnitudes = reference.dot_interaction(dense.abs(), sparse.abs(), upper=upper)
    allowed = (dense.shape[1] + 1) * 2**-24 * magnitudes
    return ours.shape == expected.shape and bool(((ours.cpu() - expected).abs() <= allowed).all())


@settings(max_examples=30)
@given(
    batch=st.integers(0, 6),
    count=st.sampled_from([0, 1, 3, 4, 7, 26]),
    dim=st.sampled_from([1, 3, 4, 31, 64, 130]),
    upper=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_equal_the_reference(  # noqa: PLR0917 (hypothesis draws them by name)
    device, batch, count, dim, upper, seed
):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, dim, generator=generator)
    sparse = torch.randn(batch, count * dim, generator=generator)
    ours = torch.ops.tessera.dot_interaction(*on(device, dense, sparse), upper)
    assert near(ours, dense, sparse, upper)
    assert torch.equal(ours[:, :dim].cpu(), dense)


def test_more_vectors_than_shared_memory_holds(device):
    dense, sparse = torch.randn(2, 512), torch.randn(2, 70 * 512)
    ours = torch.ops.tessera.dot_interaction(*on(device, dense, sparse))
    assert near(ours, dense, sparse, upper=False)


@settings(max_examples=40)
@given(
    kind=st.sampled_from([INT8, BLOCK_INT8, FLOAT16]),
    told=st.sampled_from([None, INT8, BLOCK_INT8, FLOAT16]),
    dim=st.sampled_from([32, 64, 128]),
    features=st.sampled_from([1, 5, 26, 40]),
    batch=st.sampled_from([1, 3, 9]),
    most=st.sampled_from([1, 2, 6]),
    rule=st.sampled_from(list(IdRule)),
    out_of_range=st.sampled_from(list(OutOfRange)),
    pooling=st.sampled_from(list(Pooling)),
    wide=st.booleans(),
    upper=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_fused_equals_the_two_steps(  # noqa: PLR0917 (hypothesis draws them by name)
    device, kind, told, dim, features, batch, most, rule, out_of_range, pooling, wide, upper, seed
):
    """Also where the hint tells of another weight type."""
    generator = torch.Generator().manual_seed(seed)

    def plan_and_weights(kind):
        packed = pack_tables([random_table(generator, 9, dim, kind) for _ in range(features)])
        lookups = [
            FeatureLookup(
                table=place,
                out_column=dim * k,
                id_rule=rule,
                out_of_range=out_of_range,
                pooling=pooling,
            )
            for k, place in enumerate(packed.places)
        ]
        return make_plan(lookups), packed.weights

    plan, weights = plan_and_weights(kind)
    hint = 0 if told is None else ops.launch_hint(plan_and_weights(told)[0])
    lengths = torch.randint(0, most + 1, (features * batch,), generator=generator)
    indices = torch.randint(-2, 12, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(batch, dim, generator=generator)
    arguments = on(device, weights, plan, indices if wide else indices.int(), lengths)
    (dense,) = on(device, dense)
    pooled = torch.ops.tessera.lookup(*arguments, features * dim)
    expected = torch.ops.tessera.dot_interaction(dense, pooled, upper)
    fused = torch.ops.tessera.lookup_dot_interaction(*arguments, dense, upper=upper, launch=hint)
    assert torch.equal(fused, expected)


@settings(max_examples=30)
@given(call=calls(dim=32), upper=st.booleans())
def test_fused_over_any_features(device, call, upper):
    features = call.plan.shape[0]
    in_order = call.plan.clone()
    in_order[:, 8] = torch.arange(features) * 32
    batch = call.lengths.numel() // features
    jagged = on(device, call.indices, call.lengths)
    weights, in_order, plan, id_weights, dense = on(
        device, call.tables.weights, in_order, call.plan, call.id_weights, torch.randn(batch, 32)
    )
    counts, fused_counts = (
        torch.zeros(features, dtype=torch.int64, device=device) for _ in range(2)
    )
    pooled = torch.ops.tessera.lookup(
        weights, in_order, *jagged, features * 32, id_weights, outside=counts
    )
    expected = torch.ops.tessera.dot_interaction(dense, pooled, upper)
    # The features' own columns may lie anywhere: they are not read.
    plan[:, plan_column("out_column")] = 0
    fused = torch.ops.tessera.lookup_dot_interaction(
        weights, plan, *jagged, dense, id_weights, fused_counts, upper=upper
    )
    assert torch.equal(fused, expected)
    assert torch.equal(fused_counts, counts)


@pytest.mark.parametrize(
    ("dense", "sparse"),
    [
        (torch.randn(2, 4), torch.randn(3, 8)),
        (torch.randn(2, 4), torch.randn(2, 9)),
        (torch.randn(2, 4).double(), torch.randn(2, 8)),
        (torch.randn(2, 4), torch.randn(16, 2).T),
    ],
)
def test_unusable_vectors_are_refused(device, dense, sparse):
    with pytest.raises(RuntimeError, match=r"dense|sparse"):
        torch.ops.tessera.dot_interaction(*on(device, dense, sparse))
