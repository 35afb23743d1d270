"""The lookup operators against the plain reference, on the CPU and (marked gpu) on CUDA.

Both sum a bag in the order of its ids and round each step once, as the reference does: equality
is bit for bit.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.kernels import ops, reference
from tessera.kernels.plan import IdRule, OutOfRange, Pooling
from tessera.kernels.row_types import (
    BLOCK_INT8,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    kernel_types,
)
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.kernels.cases import calls, random_table

SETTINGS = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def on(device, *tensors):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def same(ours, expected):
    """Bitwise; NaN marks columns that the reference leaves unwritten."""
    written = ~torch.isnan(expected)
    # Chosen on the device: initcheck would report a copy of columns that nobody wrote.
    return torch.equal(ours[written.to(ours.device)].cpu(), expected[written])


@SETTINGS
@given(call=calls(), as_offsets=st.booleans(), hint=st.booleans())
def test_pooled_equals_the_reference(device, call, as_offsets, hint):
    expected, outside = reference.lookup(
        call.tables.weights,
        call.plan,
        call.indices,
        call.lengths,
        call.width,
        id_weights=call.id_weights,
        dtype=call.dtype,
    )
    jagged = call.offsets() if as_offsets else call.lengths
    weights, plan, indices, jagged, id_weights = on(
        device, call.tables.weights, call.plan, call.indices, jagged, call.id_weights
    )
    counts = torch.zeros(plan.shape[0], dtype=torch.int64, device=device)
    ours = torch.ops.tessera.lookup(
        weights,
        plan,
        indices,
        jagged,
        call.width,
        id_weights,
        outside=counts,
        offsets=as_offsets,
        dtype=call.dtype,
        launch=ops.launch_hint(call.plan) if hint else 0,
    )
    assert same(ours, expected)
    assert counts.tolist() == outside.tolist()


@SETTINGS
@given(call=calls())
def test_without_counts_and_into_the_callers_buffer(device, call):
    expected, _ = reference.lookup(
        call.tables.weights, call.plan, call.indices, call.lengths, call.width, dtype=call.dtype
    )
    weights, plan, indices, lengths = on(
        device, call.tables.weights, call.plan, call.indices, call.lengths
    )
    out = torch.full((expected.shape[0], call.width), 7.0, dtype=call.dtype, device=device)
    torch.ops.tessera.lookup_out(weights, plan, indices, lengths, out)
    assert same(out, expected)
    assert bool((out.cpu()[torch.isnan(expected)] == 7.0).all()), "the gap was touched"


@SETTINGS
@given(call=calls(dim=24, rows_output=True))
def test_unpooled_equals_the_reference(device, call):
    expected = reference.lookup_rows(
        call.tables.weights, call.plan, call.indices, call.lengths, call.width, dtype=call.dtype
    )
    weights, plan, indices, lengths = on(
        device, call.tables.weights, call.plan, call.indices, call.lengths
    )
    ours = torch.ops.tessera.lookup_rows(
        weights, plan, indices, lengths, call.width, dtype=call.dtype
    )
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("weight_type", kernel_types())
@pytest.mark.parametrize("dim", [512, 513, 1024, 2048])
def test_wide_rows(device, weight_type, dim):
    generator = torch.Generator().manual_seed(dim)
    packed = pack_tables([random_table(generator, 6, dim, weight_type)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0, pooling=Pooling.MEAN)])
    lengths = torch.tensor([3, 0, 40])
    indices = torch.arange(43) % 6
    expected, _ = reference.lookup(packed.weights, plan, indices, lengths, dim)
    ours = torch.ops.tessera.lookup(*on(device, packed.weights, plan, indices, lengths), dim)
    assert same(ours, expected)


def test_a_thousand_tables(device):
    generator = torch.Generator().manual_seed(1)
    kinds = kernel_types()
    packed = pack_tables(
        [random_table(generator, 1 + t % 5, 4 + t % 9, kinds[t % len(kinds)]) for t in range(1000)]
    )
    features, column = [], 0
    for place in packed.places:
        features.append(FeatureLookup(table=place, out_column=column, out_of_range=OutOfRange.ZERO))
        column += place.dim
    plan = make_plan(features)
    lengths = torch.randint(0, 3, (3000,), generator=generator)
    indices = torch.randint(-1, 6, (int(lengths.sum()),), generator=generator)
    expected, _ = reference.lookup(packed.weights, plan, indices, lengths, column)
    ours = torch.ops.tessera.lookup(*on(device, packed.weights, plan, indices, lengths), column)
    assert same(ours, expected)


@pytest.mark.parametrize("batch", [1, 33, 700])
def test_large_batches_of_long_and_short_bags(device, batch):
    generator = torch.Generator().manual_seed(batch)
    packed = pack_tables(
        [random_table(generator, 50, 128, INT8, scale_shift=s) for s in (0, 3, 32)]
    )
    features = [
        FeatureLookup(table=place, out_column=128 * k) for k, place in enumerate(packed.places)
    ]
    plan = make_plan(features)
    most = torch.tensor([2, 9, 3])[:, None].expand(3, batch).reshape(-1)
    lengths = (torch.rand(3 * batch, generator=generator) * most).long()
    indices = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    expected, _ = reference.lookup(packed.weights, plan, indices, lengths, 384, dtype=torch.float16)
    ours = torch.ops.tessera.lookup(
        *on(device, packed.weights, plan, indices, lengths),
        384,
        dtype=torch.float16,
        launch=ops.launch_hint(plan),
    )
    assert same(ours, expected)


ALIKE = [
    (INT8, 0),
    (INT8, 2),
    (INT8, 32),
    (INT4, 0),
    (INT4, 32),
    (BLOCK_INT8, 0),
    (FLOAT8, 0),
    (FLOAT16, 0),
    (FLOAT32, 0),
]


@SETTINGS
@given(
    kind=st.sampled_from(ALIKE),
    told=st.sampled_from(ALIKE),
    dims=st.lists(st.sampled_from([4, 8, 36, 64, 96, 100, 128, 600]), min_size=1, max_size=3),
    batch=st.integers(1, 40),
    most=st.sampled_from([1, 4, 30]),
    wide=st.booleans(),
    pooling=st.sampled_from(list(Pooling)),
    seed=st.integers(0, 2**31),
)
def test_features_that_are_alike(  # noqa: PLR0917 (hypothesis draws them by name)
    device, kind, told, dims, batch, most, wide, pooling, seed
):
    """Kernels made for one kind of feature, also when the hint tells of another kind."""
    generator = torch.Generator().manual_seed(seed)

    def packed_as(kind):
        return pack_tables(
            [random_table(generator, 9, dim, kind[0], scale_shift=kind[1]) for dim in dims]
        )

    def plan_of(packed):
        features, column = [], 0
        for place in packed.places:
            features.append(FeatureLookup(table=place, out_column=column, pooling=pooling))
            column += place.dim
        return make_plan(features)

    packed = packed_as(kind)
    plan = plan_of(packed)
    lengths = torch.randint(0, most + 1, (len(dims) * batch,), generator=generator)
    indices = torch.randint(-2, 12, (int(lengths.sum()),), generator=generator)
    indices = indices if wide else indices.int()
    expected, _ = reference.lookup(packed.weights, plan, indices, lengths, sum(dims))
    ours = torch.ops.tessera.lookup(
        *on(device, packed.weights, plan, indices, lengths),
        sum(dims),
        launch=ops.launch_hint(plan_of(packed_as(told))),
    )
    assert same(ours, expected)


@SETTINGS
@given(
    kind=st.sampled_from(ALIKE),
    told=st.sampled_from(ALIKE),
    dim=st.sampled_from([32, 64, 128, 256, 512]),
    features=st.integers(1, 4),
    batch=st.sampled_from([1, 7, 40, 150]),
    most=st.sampled_from([1, 2, 9, 60]),
    rules=st.lists(
        st.tuples(st.sampled_from(list(IdRule)), st.sampled_from(list(OutOfRange))),
        min_size=1,
        max_size=2,
    ),
    wide=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]),
    seed=st.integers(0, 2**31),
)
def test_features_of_one_kind_and_one_width(  # noqa: PLR0917 (hypothesis draws them by name)
    device, kind, told, dim, features, batch, most, rules, wide, dtype, seed
):
    """Kernels made for one width, long and short bags, also when the hint tells of another kind."""
    generator = torch.Generator().manual_seed(seed)

    def plan_and_weights(kind):
        packed = pack_tables(
            [
                random_table(generator, 30, dim, kind[0], scale_shift=kind[1])
                for _ in range(features)
            ]
        )
        lookups = [
            FeatureLookup(
                table=place,
                out_column=dim * k,
                id_rule=rules[k % len(rules)][0],
                out_of_range=rules[k % len(rules)][1],
                expected_ids=float(k % 2),
            )
            for k, place in enumerate(packed.places)
        ]
        return make_plan(lookups), packed.weights

    plan, weights = plan_and_weights(kind)
    lengths = torch.randint(0, most + 1, (features * batch,), generator=generator)
    indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
    arguments = (weights, plan, indices if wide else indices.int(), lengths)
    # The kernels without a hint are held to the slow reference above; that would take minutes here.
    scale = 16.0 if dtype == torch.float8_e4m3fn else 1.0
    plain = torch.ops.tessera.lookup(*arguments, dim * features, dtype=dtype, scale=scale)
    ours = torch.ops.tessera.lookup(
        *on(device, *arguments),
        dim * features,
        dtype=dtype,
        scale=scale,
        launch=ops.launch_hint(plan_and_weights(told)[0]),
    )
    assert torch.equal(ours.cpu().view(torch.uint8), plain.view(torch.uint8))


@SETTINGS
@given(call=calls(), hint=st.booleans())
def test_pooled_as_float8(device, call, hint):
    expected, _ = reference.lookup(
        call.tables.weights,
        call.plan,
        call.indices,
        call.lengths,
        call.width,
        id_weights=call.id_weights,
    )
    arguments = (call.tables.weights, call.plan, call.indices, call.lengths)
    ours = torch.ops.tessera.lookup(
        *on(device, *arguments),
        call.width,
        *on(device, call.id_weights),
        dtype=torch.float8_e4m3fn,
        scale=64.0,
        launch=ops.launch_hint(call.plan) if hint else 0,
    )
    written = ~torch.isnan(expected)
    wanted = reference.to_float8(expected * 64)
    assert torch.equal(ours.float().cpu()[written], wanted.float()[written])


def test_only_float8_is_scaled(device):
    packed = pack_tables([random_table(torch.Generator(), 4, 16, FLOAT16)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    ids, lengths = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="scale: only float8_e4m3fn has one other than 1, got 2"):
        torch.ops.tessera.lookup(*on(device, packed.weights, plan, ids, lengths), 16, scale=2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("gap", "apart"), [(8, 0), (128, 8), (6, 3), (1, 0), (520, 0), (0, 0)])
def test_the_dense_vector_fills_the_gap(device, gap, apart, dtype):
    generator = torch.Generator().manual_seed(3)
    packed = pack_tables([random_table(generator, 4, 16, FLOAT16)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=gap)])
    lengths = torch.randint(0, 3, (70,), generator=generator)
    indices = torch.randint(0, 4, (int(lengths.sum()),), generator=generator)
    width = gap + 16
    expected, _ = reference.lookup(packed.weights, plan, indices, lengths, width, dtype=dtype)
    wide = torch.randn(70, gap + apart, generator=generator).to(dtype)
    expected = torch.cat([wide[:, apart:].float(), expected[:, gap:].float()], dim=1).to(dtype)
    weights, plan, indices, lengths, wide = on(device, packed.weights, plan, indices, lengths, wide)
    ours = torch.ops.tessera.lookup(
        weights, plan, indices, lengths, width, dense=wide[:, apart:], dtype=dtype
    )
    assert torch.equal(ours.float().cpu(), expected.float())


@pytest.mark.gpu
def test_wrong_offsets_never_leave_the_ids():
    """A GPU cannot refuse them without waiting; compute-sanitizer watches this test for reads."""
    generator = torch.Generator().manual_seed(4)
    packed = pack_tables([random_table(generator, 4, 128, INT8)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    offsets = torch.tensor([5, -7, 10**12, 2, 2**40])
    weights, plan, indices, offsets = on("cuda", packed.weights, plan, torch.arange(6), offsets)
    ours = torch.ops.tessera.lookup(weights, plan, indices, offsets, 128, offsets=True)
    assert ours.shape == (4, 128)
    torch.cuda.synchronize()
