"""Table layout and quantization against plain arithmetic and FBGEMM's layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.kernels import reference
from tessera.kernels.plan import IdRule, OutOfRange, plan_column
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT4, INT8
from tessera.kernels.tables import (
    TABLE_SCALE_SHIFT,
    FeatureLookup,
    TableRows,
    fbgemm_place,
    from_fbgemm_rows,
    make_plan,
    pack_tables,
    scale_lies_beside,
)


def decoded(table):
    """All rows of a table through the reference: float32 [R, D]."""
    packed = pack_tables([table])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    ids = torch.arange(table.rows)
    return reference.lookup_rows(packed.weights, plan, ids, torch.tensor([table.rows]), table.dim)


@pytest.mark.parametrize("scale_shift", [0, 2, TABLE_SCALE_SHIFT])
@pytest.mark.parametrize(("weight_type", "levels"), [(INT8, 255), (INT4, 15)])
def test_affine_error_is_half_a_step(weight_type, levels, scale_shift):
    values = torch.randn(37, 33, generator=torch.Generator().manual_seed(0))
    table = quantize_table(values, weight_type, scale_shift=scale_shift, scale_dtype=torch.float32)
    for row in range(37):
        group = values[
            (row >> scale_shift) << scale_shift : ((row >> scale_shift) + 1) << scale_shift
        ]
        step = (group.max() - group.min()) / levels
        error = (decoded(table)[row] - values[row]).abs().max()
        assert error <= step * 0.5 + 1e-6  # and float32's rounding of values near 1


def test_float_types_round_like_casts():
    values = torch.randn(5, 9)
    assert torch.equal(decoded(quantize_table(values, FLOAT32)), values)
    assert torch.equal(decoded(quantize_table(values, FLOAT16)), values.half().float())
    bf16 = quantize_table(values, BFLOAT16)
    assert torch.equal(decoded(bf16), values.bfloat16().float())
    fp8 = quantize_table(values, FLOAT8, scale_dtype=torch.float32)
    # e4m3 keeps 3 bits after the first: relative error 2^-4, absolute 2^-10 of the scaled row.
    bound = values.abs() * 2**-4 + fp8.scale[:, :1] * 2**-10
    assert bool(((decoded(fp8) - values).abs() <= bound).all())


@pytest.mark.parametrize("data_bytes", [*range(1, 130), 544, 1000])
def test_a_scale_lies_beside_where_it_makes_no_row_longer_or_fills_a_sector(data_bytes):
    left = -data_bytes // 4 * -4 % 16  # bytes of the last 16 that the row takes, in steps of 4
    assert scale_lies_beside(data_bytes, 4) == (0 < left <= 12 or data_bytes in range(13, 29))


def test_each_table_has_its_scales_where_they_belong():
    tables = [quantize_table(torch.randn(5, dim), INT8) for dim in (16, 64)]
    beside, apart = pack_tables(tables, scale_beside=None).places
    assert (beside.row_stride, beside.scale_stride) == (32, 32)
    assert beside.scale_offset == beside.data_offset + 16
    assert (apart.row_stride, apart.scale_stride) == (64, 4)
    assert apart.scale_offset == apart.data_offset + 5 * 64 + 64  # at a multiple of 128


def test_every_fp8_code_is_decoded():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    table = TableRows(data=codes[None], weight_type=FLOAT8, dim=254)
    packed = pack_tables([table])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    ours = torch.ops.tessera.lookup(packed.weights, plan, torch.tensor([0]), torch.tensor([1]), 254)
    assert torch.equal(ours[0], codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("weight_type", [INT8, INT4])
@pytest.mark.parametrize("dim", [8, 64, 100])
def test_fbgemms_rows_are_read_in_place_and_converted(weight_type, dim):
    pytest.importorskip("fbgemm_gpu")
    bits = 8 if weight_type is INT8 else 4
    values = torch.randn(20, dim)
    if bits == 8:
        nbit = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values)
        # that operator keeps fp32 scales at the end; the inference layout has fp16 in front
        pair = nbit[:, dim:].contiguous().view(torch.float32).half()
        rows = torch.cat([pair.view(torch.uint8), nbit[:, :dim]], dim=1)
    else:
        fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(values, 4)
        rows = torch.cat([fused[:, -4:], fused[:, :-4]], dim=1).contiguous()
    place = fbgemm_place(
        offset=0, row_stride=rows.shape[1], rows=20, dim=dim, weight_type=weight_type
    )
    plan = make_plan([FeatureLookup(table=place, out_column=0)])
    ids = torch.arange(20)
    in_place = torch.ops.tessera.lookup(rows.flatten(), plan, ids, torch.ones(20).int(), dim)
    converted = decoded(from_fbgemm_rows(rows, dim=dim, weight_type=weight_type))
    assert torch.equal(in_place, converted)
    step = (values.amax(1) - values.amin(1)).max() / (2**bits - 1)
    assert (in_place - values).abs().max() <= step  # half a step, and fp16 scale and bias


@settings(max_examples=200)
@given(
    raw=st.integers(-(2**63), 2**63 - 1),
    rows=st.one_of(st.integers(1, 40), st.integers(1, 2**31 - 1), st.just(2**30)),
    rule=st.sampled_from(list(IdRule)),
    out_of_range=st.sampled_from(list(OutOfRange)),
)
def test_ids_become_the_rows_that_python_integers_say(raw, rows, rule, out_of_range):
    # Row r of this table is a view of one byte: the answer is the row's scale, which is r.
    row, outside = reference.resolve_id(raw, rows, rule, out_of_range)
    small = TableRows(
        data=torch.ones(1, 1, dtype=torch.uint8),
        weight_type=INT8,
        dim=1,
        scale=torch.tensor([[1.0, 0.0]]),
    )
    packed = pack_tables([small])
    plan = make_plan(
        [
            FeatureLookup(
                table=packed.places[0], out_column=0, id_rule=rule, out_of_range=out_of_range
            )
        ]
    )
    plan[0, plan_column("row_stride")] = 0  # every row is the one row, so any number of rows fits
    plan[0, plan_column("rows")] = rows
    reciprocal = (2**64 - 1) // rows
    plan[0, plan_column("reciprocal")] = reciprocal - 2**64 if reciprocal >= 2**63 else reciprocal
    plan[0, plan_column("scale_shift")] = 32
    counts = torch.zeros(1, dtype=torch.int64)
    out = torch.ops.tessera.lookup(
        packed.weights, plan, torch.tensor([raw]), torch.tensor([1]), 1, outside=counts
    )
    assert out.item() == (0.0 if row < 0 else 1.0)
    assert counts.item() == outside


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000, 65537])
@pytest.mark.parametrize("rule", [IdRule.MODULO, IdRule.MURMUR3])
def test_hashed_rows_are_exact(rows, rule):
    values = torch.arange(rows, dtype=torch.float32)[:, None]
    packed = pack_tables([quantize_table(values, FLOAT32)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0, id_rule=rule)])
    raw = torch.randint(-(2**63), 2**63 - 1, (500,))
    raw = torch.cat([raw, torch.tensor([0, -1, 2**63 - 1, -(2**63), rows, -rows])])
    ours = torch.ops.tessera.lookup(packed.weights, plan, raw, torch.ones(506).long(), 1)
    expected = [reference.resolve_id(x, rows, rule, OutOfRange.CLAMP)[0] for x in raw.tolist()]
    assert ours[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: quantize_table(torch.ones(2, 2).double(), INT8), "float32 matrix"),
        (lambda: quantize_table(torch.tensor([[float("nan")]]), INT8), "NaN"),
        (lambda: quantize_table(torch.ones(2, 2), INT8, scale_shift=40), "scale_shift"),
        (lambda: quantize_table(torch.ones(2, 2) * 1e6, INT8), "float16"),
        (lambda: pack_tables([]), "there is none"),
        (lambda: make_plan([]), "there is none"),
        (
            lambda: TableRows(data=torch.ones(2, 3, dtype=torch.uint8), weight_type=INT8, dim=3),
            "int8 rows need one",
        ),
        (
            lambda: TableRows(data=torch.ones(2, 3, dtype=torch.uint8), weight_type=INT8, dim=4),
            r"\[2, 3\] is not \[rows, 4\]",
        ),
        (
            lambda: from_fbgemm_rows(torch.ones(2, 8, dtype=torch.uint8), dim=8, weight_type=INT8),
            "too short for 12 bytes",
        ),
        (
            lambda: from_fbgemm_rows(
                torch.ones(2, 8, dtype=torch.uint8), dim=8, weight_type=FLOAT8
            ),
            "no row layout",
        ),
    ],
)
def test_unusable_tables_are_refused(action, message):
    with pytest.raises(UserError, match=message):
        action()
