"""Lookups of any width, of one width and of many in one call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.kernels import ops, reference
from tessera.kernels.plan import IdRule, OutOfRange, PlanRow, Pooling
from tessera.kernels.row_types import (
    BFLOAT16,
    BLOCK_INT8,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
)
from tessera.kernels.tables import FeatureLookup, TableRows, make_plan, pack_tables
from tests.kernels.cases import random_table

KINDS = [
    (INT8, 0),
    (INT8, 32),
    (INT4, 0),
    (INT4, 32),
    (BLOCK_INT8, 0),
    (FLOAT8, 0),
    (FLOAT8, 32),
    (FLOAT16, 0),
    (BFLOAT16, 0),
    (FLOAT32, 0),
]
DIMS = [4, 12, 16, 20, 32, 36, 48, 64, 96, 100, 128, 160, 192, 320, 512, 1000, 1024]
OLD_HINT = (1 << 26) - 1
"""The bits that a package had before widths were told."""


def call_of(generator, kind, dims, batch, most, *, rules=(), pooling=None, beside=False):
    """A call's weights, plan, ids and lengths, on the CPU, and the width of its output."""
    packed = pack_tables(
        [random_table(generator, 30, dim, kind[0], scale_shift=kind[1]) for dim in dims],
        scale_beside=beside,
    )
    features, column = [], 0
    for k, place in enumerate(packed.places):
        id_rule, out_of_range = rules[k % len(rules)] if rules else (IdRule.NONE, OutOfRange.CLAMP)
        features.append(
            FeatureLookup(
                table=place,
                out_column=column,
                pooling=pooling[k % len(pooling)] if pooling else Pooling.SUM,
                id_rule=id_rule,
                out_of_range=out_of_range,
                expected_ids=float(k % 3),
            )
        )
        column += place.dim
    lengths = torch.randint(0, most + 1, (len(dims) * batch,), generator=generator)
    indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
    return (packed.weights, make_plan(features), indices, lengths), column


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize("dim", DIMS)
def test_every_width_equals_the_reference(device, dim, kind):
    generator = torch.Generator().manual_seed(dim)
    call, width = call_of(generator, kind, [dim, dim], 5, 11)
    expected, _ = reference.lookup(*call, width)
    weights, plan, indices, lengths = (tensor.to(device) for tensor in call)
    # A package from before the hint told of widths takes other kernels of a GPU.
    for hint in (ops.launch_hint(call[1]), ops.launch_hint(call[1]) & OLD_HINT):
        out = torch.full((5, width + 4), 7.0, device=device)
        torch.ops.tessera.lookup_out(weights, plan, indices, lengths, out, launch=hint)
        assert torch.equal(out[:, :width].cpu(), expected)
        assert bool((out[:, width:] == 7.0).all()), "columns of no feature were touched"


def assert_equals_the_cpu(call, width, **options):
    """The lookup ``call`` (weights, plan, indices, lengths) gives the same bits on a GPU as on the CPU."""
    expected = torch.ops.tessera.lookup(*call, width, **options)
    ours = torch.ops.tessera.lookup(
        *(tensor.cuda() for tensor in call), width, **options, launch=ops.launch_hint(call[1])
    )
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize("most", [1, 4, 30])
@pytest.mark.parametrize("dims", [[20, 20], [128, 128], [100, 36, 8], [160, 428, 1000], [2500]])
def test_few_and_many_bags_equal_the_cpu(dims, most, kind):
    """Batches on both sides of what the kernels for few bags take, as float32 and float16."""
    generator = torch.Generator().manual_seed(most)
    for batch in (3, 4000):
        call, width = call_of(generator, kind, dims, batch, most, beside=batch == 3)
        on_gpu = [tensor.cuda() for tensor in call]
        for dtype in (torch.float32, torch.float16):
            expected = torch.ops.tessera.lookup(*call, width, dtype=dtype)
            ours = torch.ops.tessera.lookup(
                *on_gpu, width, dtype=dtype, launch=ops.launch_hint(call[1])
            )
            assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize(
    "dims",
    [[20] * 3, [128] * 2, [100, 36, 8], [84] * 3, [908, 60, 300], [160, 428, 1000], [8, 2500]],
)
@pytest.mark.parametrize(
    "bag_sizes",
    [[1], [0, 1, 2], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 5, 0, 0]],
    ids=lambda sizes: "".join(map(str, sizes)),
)
def test_bags_of_about_one_id_equal_the_cpu(bag_sizes, dims, kind):
    """Batches on both sides of what the kernels for bags of one id take, and bags that are longer.

    Their ids are as many as the bags, or nearly.
    """
    generator = torch.Generator().manual_seed(len(dims))
    for batch in (3, 900, 6000, 25_000) if max(dims) < 200 else (3, 1500):
        call, width = call_of(generator, kind, dims, batch, 1, beside=batch == 900)
        weights, plan = call[:2]
        which = torch.randint(0, len(bag_sizes), (len(dims) * batch,), generator=generator)
        lengths = torch.tensor(bag_sizes)[which]
        indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        for dtype in (torch.float16, torch.bfloat16) if batch != 900 else (torch.float32,):
            arguments = (weights, plan, indices, lengths)
            expected = torch.ops.tessera.lookup(*arguments, width, dtype=dtype)
            ours = torch.ops.tessera.lookup(
                *(tensor.cuda() for tensor in arguments),
                width,
                dtype=dtype,
                launch=ops.launch_hint(plan),
            )
            assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("id_rule", list(IdRule))
@pytest.mark.parametrize("wide", [False, True])
def test_one_id_with_every_rule_equals_the_cpu(wide, id_rule, pooling):
    generator = torch.Generator().manual_seed(3)
    rules = [(id_rule, OutOfRange.CLAMP)]
    for kind in ((INT8, 0), (BLOCK_INT8, 0), (INT4, 0), (FLOAT16, 0)):
        (weights, plan, _, _), width = call_of(
            generator, kind, [48, 36, 200], 4000, 1, rules=rules, pooling=[pooling]
        )
        lengths = torch.ones(3 * 4000, dtype=torch.int64)
        lengths[7:11] = torch.tensor([0, 2, 0, 2])
        indices = torch.randint(-2, 1 << 30, (3 * 4000,), generator=generator)
        call = (weights, plan, indices if wide else indices.int(), lengths)
        assert_equals_the_cpu(call, width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(INT8, 0), (INT8, 32), (BLOCK_INT8, 0), (FLOAT8, 0), (INT4, 0)])
@pytest.mark.parametrize("rows", [30, 4000])
@pytest.mark.parametrize("dims", [[12, 20], [44, 100, 60], [728, 8, 100]])
def test_the_pipe_of_many_rows_equals_the_cpu(dims, rows, kind):
    """Batches on both sides of what it takes, and of ids that repeat and that do not."""
    generator = torch.Generator().manual_seed(rows)
    tables = [random_table(generator, rows, dim, kind[0], scale_shift=kind[1]) for dim in dims]
    for batch, beside in ((300, True), (1500, False), (3000, True), (9000, False)):
        packed = pack_tables(tables, scale_beside=beside)
        columns = [sum(dims[:k]) for k in range(len(dims))]
        plan = make_plan(
            [
                FeatureLookup(table=place, out_column=column, expected_ids=14.0)
                for place, column in zip(packed.places, columns, strict=True)
            ]
        )
        lengths = torch.randint(0, 30, (len(dims) * batch,), generator=generator)
        indices = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
        call = (packed.weights, plan, indices, lengths)
        assert_equals_the_cpu(call, sum(dims), dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(INT8, 0), (INT4, 0), (BLOCK_INT8, 0), (FLOAT8, 0), (FLOAT16, 0)])
@pytest.mark.parametrize(
    "dims", [[120, 120], [128, 128], [20], [44], [12, 40, 36], [56, 116, 8], [444], [908, 100]]
)
@pytest.mark.parametrize("sizes", [(0, 60), (30, 31)], ids=["differ", "alike"])
def test_long_bags_of_many_lengths_equal_the_cpu(sizes, dims, kind):
    """Few blocks, some that order the bags of a tile, and many that order those of several tiles.

    Bags are ordered where they have more than 20 ids on average.
    """
    generator = torch.Generator().manual_seed(dims[0])
    for batch in (1000, 9001, 40_003) if max(dims) < 200 else (700, 9001):
        (weights, plan, _, _), width = call_of(
            generator, kind, dims, batch, 1, beside=batch == 9001, pooling=[Pooling.SUM]
        )
        lengths = torch.randint(*sizes, (len(dims) * batch,), generator=generator)
        lengths[5] = 1500
        indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        call = (weights, plan, indices.int(), lengths)
        assert_equals_the_cpu(call, width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("wide", [False, True])
def test_long_bags_with_every_rule_equal_the_cpu(wide, pooling):
    generator = torch.Generator().manual_seed(5)
    for id_rule in IdRule:
        for kind in ((INT8, 0), (FLOAT8, 32)):
            (weights, plan, indices, lengths), width = call_of(
                generator,
                kind,
                [52, 120],
                12_000,
                60,
                rules=[(id_rule, OutOfRange.CLAMP)],
                pooling=[pooling],
            )
            call = (weights, plan, indices if wide else indices.int(), lengths)
            assert_equals_the_cpu(call, width)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize("dims", [[12] * 7, [16] * 6, [32] * 5, [20, 4, 28, 8]])
@pytest.mark.parametrize("pooling", list(Pooling))
def test_long_bags_of_narrow_rows_equal_the_cpu(pooling, dims, kind):
    """More bags than there is room for at once, a few times as many, and so many that other kernels take them."""
    generator = torch.Generator().manual_seed(dims[0])
    for bags, id_rule in (
        (3000, IdRule.NONE),
        (10_000, IdRule.NONE),
        (30_000, IdRule.MODULO),
        (40_000, IdRule.MURMUR3),
    ):
        batch = bags // len(dims)
        (weights, plan, _, _), width = call_of(
            generator,
            kind,
            dims,
            batch,
            1,
            rules=[(id_rule, OutOfRange.CLAMP)],
            pooling=[pooling],
            beside=bags == 10_000,
        )
        lengths = torch.randint(0, 30, (len(dims) * batch,), generator=generator)
        lengths[5] = 1500
        indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        call = (weights, plan, indices if bags == 30_000 else indices.int(), lengths)
        assert_equals_the_cpu(call, width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", [(INT8, 0), (INT4, 0), (BLOCK_INT8, 0), (FLOAT8, 32), (FLOAT16, 0)]
)
@pytest.mark.parametrize("features", [1, 5, 25, 32, 33, 40])
def test_one_id_of_many_widths_equals_the_cpu(features, kind):
    """Calls that fill the machine one to three times, on both sides of the features that are ordered."""
    generator = torch.Generator().manual_seed(features)
    widths = torch.randint(1, 256, (features,), generator=generator)
    narrow = torch.randint(0, 2, (features,), generator=generator) * 250
    dims = [4 * max(int(wide) - int(less), 1) for wide, less in zip(widths, narrow, strict=True)]
    dims[-1] = 1024
    for bags in (30_000, 50_000, 90_000):
        batch = bags // features
        (weights, plan, _, _), width = call_of(generator, kind, dims, batch, 1)
        lengths = torch.ones(features * batch, dtype=torch.int64)
        indices = torch.randint(-2, 33, (features * batch,), generator=generator)
        assert_equals_the_cpu((weights, plan, indices, lengths), width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_type", [INT8, INT4])
@pytest.mark.parametrize("dim", [20, 64, 120])
def test_sums_of_scales_of_all_sizes_equal_the_cpu(dim, weight_type):
    """From the smallest number of half precision to the largest, of both signs."""
    generator = torch.Generator().manual_seed(dim)
    bits = torch.randint(-(2**15), 2**15, (512, 2), generator=generator, dtype=torch.int16)
    scales = torch.where(bits.view(torch.float16).isfinite(), bits, 1).view(torch.float16)
    scales[:100] = 2.0**-24
    data = torch.randint(
        0, 256, (512, weight_type.data_bytes(dim)), generator=generator, dtype=torch.uint8
    )
    data[:50] = 0
    table = TableRows(data=data, weight_type=weight_type, dim=dim, scale=scales)
    for batch, most in ((40, 300), (6000, 30), (6000, 5)):
        packed = pack_tables([table], scale_beside=batch == 40)
        plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
        lengths = torch.randint(0, most + 1, (batch,), generator=generator)
        for rows in (100, 512):
            indices = torch.randint(0, rows, (int(lengths.sum()),), generator=generator)
            call = (packed.weights, plan, indices, lengths)
            assert_equals_the_cpu(call, dim)


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 3, 40])
def test_every_byte_of_float8_equals_the_cpu(most):
    generator = torch.Generator().manual_seed(most)
    data = torch.arange(256, dtype=torch.uint8).repeat(31, 1) + torch.arange(31)[:, None]
    table = TableRows(data=data.to(torch.uint8), weight_type=FLOAT8, dim=256)
    packed = pack_tables([table])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    for batch in (2, 500, 20_000):
        lengths = torch.randint(most // 2, most + 1, (batch,), generator=generator)
        indices = torch.randint(0, 31, (int(lengths.sum()),), generator=generator)
        call = (packed.weights, plan, indices, lengths)
        assert_equals_the_cpu(call, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [[120], [128], [444, 20]])
def test_wrong_offsets_of_long_bags_never_leave_the_ids(dims):
    generator = torch.Generator().manual_seed(1)
    (weights, plan, _, _), width = call_of(generator, (INT8, 0), dims, 12_000, 1)
    bags = len(dims) * 12_000
    indices = torch.randint(0, 30, (20 * bags,), generator=generator)
    offsets = torch.arange(bags + 1) * 20
    for wrong in (-(2**40), -5, 3, 2**35):
        broken = offsets.clone()
        broken[7::50] = wrong
        torch.ops.tessera.lookup(
            *(tensor.cuda() for tensor in (weights, plan, indices, broken)),
            width,
            offsets=True,
            launch=ops.launch_hint(plan),
        )
    torch.cuda.synchronize()
    call = (weights, plan, indices, offsets)
    ours = torch.ops.tessera.lookup(
        *(tensor.cuda() for tensor in call), width, offsets=True, launch=ops.launch_hint(plan)
    )
    assert torch.equal(ours.cpu(), torch.ops.tessera.lookup(*call, width, offsets=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize(
    "dims", [[408] * 2, [132] * 3, [636, 16], [908, 100, 260, 4], [992], [1500, 40]]
)
@pytest.mark.parametrize("most", [1, 2, 12, 40])
def test_short_bags_of_wide_rows_equal_the_cpu(most, dims, kind):
    """Bags of one id, about one and several, whose ids are up to 32 a warp and more.

    Batches on both sides of what the kernels for such rows take, and from a part of a round of
    blocks to many.
    """
    generator = torch.Generator().manual_seed(most)
    for batch in (400, 3001, 9000) if most < 40 else (3001,):
        (weights, plan, _, _), width = call_of(
            generator, kind, dims, batch, 1, beside=batch == 3001, pooling=[Pooling.SUM]
        )
        bags = len(dims) * batch
        lengths = torch.randint(0, most + 1, (bags,), generator=generator)
        if most == 1:
            lengths = torch.ones(bags, dtype=torch.int64)
        elif most == 40:  # some bags of many ids among empty ones
            lengths *= torch.randint(0, 8, (bags,), generator=generator) == 0
        indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        call = (weights, plan, indices.int() if batch == 3001 else indices, lengths)
        for dtype in (torch.float16, torch.bfloat16) if batch == 3001 else (torch.float16,):
            assert_equals_the_cpu(call, width, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("id_rule", list(IdRule))
@pytest.mark.parametrize("dims", [[408, 408], [908, 60, 300], [516, 13]])
def test_short_bags_of_wide_rows_with_every_rule_equal_the_cpu(dims, id_rule, pooling):
    generator = torch.Generator().manual_seed(7)
    rules = [(id_rule, OutOfRange.CLAMP)]
    for kind in ((INT8, 0), (BLOCK_INT8, 0), (INT4, 32), (FLOAT16, 0)):
        for most in (2, 9):
            (weights, plan, indices, lengths), width = call_of(
                generator, kind, dims, 5000, most, rules=rules, pooling=[pooling, Pooling.SUM]
            )
            call = (weights, plan, indices if most == 2 else indices.int(), lengths)
            assert_equals_the_cpu(call, width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize("dims", [[260] * 7, [408] * 3, [1024] * 2])
def test_longer_bags_of_few_wide_rows_equal_the_cpu(dims, kind):
    """Each bag has a warp at once, and some have several times the 32 ids that it looks at together."""
    generator = torch.Generator().manual_seed(3)
    for bags in (700, 1200, 3000):
        batch = bags // len(dims)
        call, width = call_of(generator, kind, dims, batch, 22, pooling=[Pooling.SUM])
        weights, plan, _, lengths = call
        lengths[3::50] = 130
        indices = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        assert_equals_the_cpu((weights, plan, indices, lengths), width, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(INT8, 0), (INT4, 0), (FLOAT16, 0)])
@pytest.mark.parametrize("before", [1, 4, 8])
def test_results_of_wide_rows_may_begin_anywhere(before, kind):
    """Behind one column, between multiples of 16 bytes and on one; other columns keep their values."""
    generator = torch.Generator().manual_seed(before)
    call, width = call_of(generator, kind, [520, 140], 5000, 2)
    on_gpu = [tensor.cuda() for tensor in call]
    expected = torch.ops.tessera.lookup(*call, width, dtype=torch.float16)
    storage = torch.full((5000 * (width + 4) + before,), 7.0, dtype=torch.float16, device="cuda")
    out = storage[before:].view(5000, width + 4)
    torch.ops.tessera.lookup_out(*on_gpu, out, launch=ops.launch_hint(call[1]))
    assert torch.equal(out[:, :width].cpu(), expected)
    assert bool((out[:, width:] == 7.0).all())
    assert bool((storage[:before] == 7.0).all())


def look_up_on_a_gpu(call, width):
    """The lookup ``call`` (weights, plan, indices, offsets), without a wait for its end."""
    torch.ops.tessera.lookup(
        *(tensor.cuda() for tensor in call),
        width,
        offsets=True,
        dtype=torch.float16,
        launch=ops.launch_hint(call[1]),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [[408], [908, 20]])
def test_wrong_offsets_of_short_bags_never_leave_the_ids(dims):
    generator = torch.Generator().manual_seed(2)
    (weights, plan, _, _), width = call_of(generator, (INT8, 0), dims, 6000, 1)
    bags = len(dims) * 6000
    most = 3 if len(dims) == 1 else 1
    indices = torch.randint(0, 30, (most * bags,), generator=generator)
    offsets = torch.arange(bags + 1) * most
    for wrong in (-(2**40), -5, 3, 2**35):
        broken = offsets.clone()
        broken[7::500] = wrong
        look_up_on_a_gpu((weights, plan, indices, broken), width)
    torch.cuda.synchronize()
    call = (weights, plan, indices, offsets)
    assert_equals_the_cpu(call, width, offsets=True, dtype=torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
@pytest.mark.parametrize(
    "dims", [[4], [20] * 3, [128] * 2, [100, 36, 8], [160, 428, 1000], [13, 516], [2040, 8]]
)
@pytest.mark.parametrize(
    "sizes", [[1], [0, 1, 2], [2, 3], [0, 5, 11], [0, 0, 0, 9]], ids=lambda s: "-".join(map(str, s))
)
def test_few_short_bags_equal_the_cpu(sizes, dims, kind):
    """From one sample to more than the kernels for few short bags take.

    Bags of one length, whose ids begin where such a kernel looks for them first, and bags of many lengths,
    the first of which are empty, so that ids begin far from there.
    """
    generator = torch.Generator().manual_seed(len(sizes))
    wide = max(dims) > 200
    for batch, wide_ids, wide_offsets in (
        (1, False, False),
        (37, True, False),
        (300, False, True),
        (900 if wide else 5000, True, True),
    ):
        (weights, plan, _, _), width = call_of(
            generator, kind, dims, batch, 1, beside=wide_ids, pooling=[Pooling.SUM, Pooling.MEAN]
        )
        bags = len(dims) * batch
        lengths = torch.tensor(sizes)[torch.randint(0, len(sizes), (bags,), generator=generator)]
        if len(sizes) > 1:
            lengths[: bags // 2] = 0
        ids = torch.randint(-2, 33, (int(lengths.sum()),), generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        call = (
            weights,
            plan,
            ids if wide_ids else ids.int(),
            offsets if wide_offsets else offsets.int(),
        )
        dense = torch.randn(batch, 8, generator=generator)
        for dtype in (torch.float16, torch.float32):
            assert_equals_the_cpu(call, width, offsets=True, dtype=dtype)
        behind = plan.clone()
        behind[:, PlanRow._fields.index("out_column")] += dense.shape[1]
        given = (weights, behind, *call[2:])
        expected = torch.ops.tessera.lookup(*given, width + 8, dense=dense, offsets=True)
        ours = torch.ops.tessera.lookup(
            *(tensor.cuda() for tensor in given),
            width + 8,
            dense=dense.cuda(),
            offsets=True,
            launch=ops.launch_hint(behind),
        )
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [(INT8, 0), (BLOCK_INT8, 0), (INT4, 0), (FLOAT16, 0)])
@pytest.mark.parametrize("most", [1, 2, 6])
def test_a_hint_of_narrower_rows_changes_no_value(most, kind):
    generator = torch.Generator().manual_seed(most)
    for told in ([20, 20], [300, 36]):
        for batch in (4, 900):
            (weights, plan, indices, lengths), width = call_of(
                generator, kind, [700, 36], batch, most
            )
            (_, other, _, _), _ = call_of(generator, kind, told, 1, 1)
            call = (weights, plan, indices, lengths)
            expected = torch.ops.tessera.lookup(*call, width, dtype=torch.float16)
            ours = torch.ops.tessera.lookup(
                *(tensor.cuda() for tensor in call),
                width,
                dtype=torch.float16,
                launch=ops.launch_hint(other),
            )
            assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("id_rule", list(IdRule))
@pytest.mark.parametrize("sizes", [[1], [0, 1, 2], [0, 3, 9]])
def test_few_short_bags_with_every_rule_equal_the_cpu(sizes, id_rule, pooling):
    generator = torch.Generator().manual_seed(5)
    rules = [(id_rule, OutOfRange.CLAMP), (IdRule.NONE, OutOfRange.HASH)]
    for kind in ((INT8, 0), (BLOCK_INT8, 0), (INT4, 32), (FLOAT8, 0), (FLOAT16, 0)):
        for batch in (9, 800):
            (weights, plan, _, _), width = call_of(
                generator,
                kind,
                [48, 36, 200],
                batch,
                1,
                rules=rules[: 1 + batch % 2],
                pooling=[pooling],
            )
            bags = 3 * batch
            lengths = torch.tensor(sizes)[
                torch.randint(0, len(sizes), (bags,), generator=generator)
            ]
            indices = torch.randint(-2, 1 << 30, (int(lengths.sum()),), generator=generator)
            call = (weights, plan, indices if batch == 9 else indices.int(), lengths)
            assert_equals_the_cpu(call, width, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dims", [[20] * 3, [300, 60]])
def test_wrong_offsets_of_few_bags_never_leave_the_ids(dims, wide):
    generator = torch.Generator().manual_seed(4)
    for batch, size in ((5, 1), (300, 1), (300, 3), (2000, 2)):
        (weights, plan, _, _), width = call_of(generator, (INT8, 0), dims, batch, 1)
        bags = len(dims) * batch
        indices = torch.randint(0, 30, (size * bags,), generator=generator)
        offsets = torch.arange(bags + 1) * size
        for wrong in (-(2**40), -5, 3, 2**35) if wide else (-(2**31), -5, 3, 2**31 - 1):
            broken = offsets.clone()
            broken[2::7] = wrong
            given = broken if wide else broken.int()
            look_up_on_a_gpu((weights, plan, indices, given), width)
        torch.cuda.synchronize()
        call = (weights, plan, indices, offsets if wide else offsets.int())
        assert_equals_the_cpu(call, width, offsets=True, dtype=torch.float16)


@pytest.mark.gpu
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    dims=st.lists(
        st.one_of(st.sampled_from(DIMS), st.integers(1, 256).map(lambda k: 4 * k), st.just(7)),
        min_size=1,
        max_size=9,
    ),
    batch=st.sampled_from([1, 2, 33, 150, 1500]),
    most=st.sampled_from([1, 2, 9, 60]),
    rules=st.lists(
        st.tuples(
            st.sampled_from(list(IdRule)), st.sampled_from([OutOfRange.CLAMP, OutOfRange.HASH])
        ),
        max_size=2,
    ),
    pooling=st.lists(st.sampled_from(list(Pooling)), max_size=2),
    beside=st.booleans(),
    wide=st.booleans(),
    old=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_mixed_widths_equal_the_cpu(  # noqa: PLR0917 (hypothesis draws them by name)
    kind, dims, batch, most, rules, pooling, beside, wide, old, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    (weights, plan, indices, lengths), width = call_of(
        generator, kind, dims, batch, most, rules=rules, pooling=pooling, beside=beside
    )
    call = (weights, plan, indices if wide else indices.int(), lengths)
    expected = torch.ops.tessera.lookup(*call, width, dtype=dtype)
    hint = ops.launch_hint(plan) & (OLD_HINT if old else -1)
    ours = torch.ops.tessera.lookup(
        *(tensor.cuda() for tensor in call), width, dtype=dtype, launch=hint
    )
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("features", [33, 64, 65, 100])
@pytest.mark.parametrize("old", [False, True])
def test_many_features_of_many_widths(features, old):
    """On both sides of the number of features up to which tiles are numbered over all of them."""
    generator = torch.Generator().manual_seed(features)
    dims = [4 * int(k) for k in torch.randint(1, 40, (features,), generator=generator)]
    call, width = call_of(generator, (BLOCK_INT8, 0), dims, 700, 5)
    expected = torch.ops.tessera.lookup(*call, width)
    hint = ops.launch_hint(call[1]) & (OLD_HINT if old else -1)
    ours = torch.ops.tessera.lookup(*(tensor.cuda() for tensor in call), width, launch=hint)
    assert torch.equal(ours.cpu(), expected)


def test_the_hint_tells_of_columns_between_multiples_of_eight():
    generator = torch.Generator().manual_seed(1)
    for dims, uneven in (([16, 8, 128], 0), ([16, 12, 4], 1), ([4], 1), ([908] * 2, 1)):
        (_, plan, _, _), _ = call_of(generator, (INT8, 0), dims, 1, 1)
        assert ops.launch_hint(plan) >> 27 & 1 == uneven
        assert ops.launch_hint(plan, shares=False) >> 26 == 0


def test_the_hint_tells_of_wide_rows_among_the_last_features():
    generator = torch.Generator().manual_seed(1)
    for dims, wide_last in (
        ([128, 128], 0),
        ([8, 128], 1),
        ([128, 8], 0),
        ([1000, 8, 8, 500], 0),
        ([1000, 8, 8, 520], 1),
        ([1000, 8, 8, 520, 8, 8, 8, 8], 0),
    ):
        (_, plan, _, _), _ = call_of(generator, (INT8, 0), dims, 1, 1)
        assert ops.launch_hint(plan) >> 28 & 1 == wide_last


@pytest.mark.gpu
def test_a_hint_of_other_widths_costs_time_only():
    generator = torch.Generator().manual_seed(1)
    kind = (INT8, 0)
    call, width = call_of(generator, kind, [4, 1024, 100, 36], 900, 6)
    expected = torch.ops.tessera.lookup(*call, width)
    on_gpu = [tensor.cuda() for tensor in call]
    for dims in ([4], [1024, 1024], [4] * 4, [4, 8], [20, 640, 12] * 30):
        hint = ops.launch_hint(call_of(generator, kind, dims, 1, 1)[0][1])
        ours = torch.ops.tessera.lookup(*on_gpu, width, launch=hint)
        assert torch.equal(ours.cpu(), expected)
