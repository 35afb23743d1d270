"""BLOCK_INT8 rows: what the bytes mean, and what quantization loses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.errors import UserError
from tessera.kernels.quantize import quantize_table
from tessera.kernels.row_types import BLOCK_INT8, INT8
from tessera.kernels.tables import FeatureLookup, TableRows, make_plan, pack_tables


def looked_up(table):
    packed = pack_tables([table])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    ids, lengths = torch.arange(table.rows), torch.ones(table.rows, dtype=torch.int64)
    return torch.ops.tessera.lookup(packed.weights, plan, ids, lengths, table.dim)


def column_scales(table):
    """The scale of each element, read bit by bit: float32 [R, D]."""
    scales = torch.empty(table.data.shape)
    for row, line in enumerate(table.data.tolist()):
        for block in range(0, len(line), 16):
            code = sum((line[block + k] & 1) << k for k in range(4))
            scales[row, block : block + 16] = table.scale[code]
    return scales[:, : table.dim]


@settings(max_examples=40)
@given(
    rows=st.integers(1, 12),
    dim=st.sampled_from([1, 3, 15, 16, 17, 40, 64, 128]),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    seed=st.integers(0, 2**31),
)
def test_values_are_scale_times_steps_and_near_the_table(rows, dim, spread, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, dim, generator=generator)
    values *= torch.exp(spread * torch.rand(rows, 1, generator=generator))
    table = quantize_table(values, BLOCK_INT8)
    scales = column_scales(table)
    steps = table.data[:, :dim].float() - 128
    assert torch.equal(looked_up(table), scales * steps)
    assert torch.equal(table.weight_type.decode(table.data, dim), scales * steps)
    # Half a step; a whole one where the lowest bit is the code's.  The rest is float32's rounding.
    allowed = scales * (0.5 + 0.5 * (torch.arange(dim) % 16 < 4)) + values.abs() * 2**-20
    assert bool(((looked_up(table) - values).abs() <= allowed).all())


def test_a_block_takes_the_least_scale_that_holds_it():
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    values *= torch.linspace(1, 20, 50)[:, None]
    table = quantize_table(values, BLOCK_INT8)
    needed = values.view(50, 4, 16).abs().amax(2) / 127
    taken = column_scales(table).view(50, 4, 16)[:, :, 0]
    below = torch.where(table.scale[None, None] >= needed[..., None], table.scale, torch.inf)
    assert torch.equal(taken, below.amin(2))
    # Even steps in logarithm over what the blocks need: no scale is further than this above it.
    ratio = (needed.max() / needed.min()) ** (1 / 15)
    assert bool((taken <= needed * ratio * (1 + 1e-5)).all())


def test_zeros_stay_zeros():
    values = torch.zeros(3, 20)
    assert torch.equal(looked_up(quantize_table(values, BLOCK_INT8)), values)
    values[1] = 5.0
    assert torch.equal(looked_up(quantize_table(values, BLOCK_INT8))[0], values[0])


def test_much_closer_than_one_scale_per_table_where_rows_differ():
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2000, 128, generator=generator)
    values *= torch.exp(3.4 * torch.rand(2000, 1, generator=generator))

    def error(table):
        return ((looked_up(table) - values).norm(dim=1) / values.norm(dim=1)).mean()

    by_row = error(quantize_table(values, INT8))
    by_block = error(quantize_table(values, BLOCK_INT8))
    by_table = error(quantize_table(values, INT8, scale_shift=32))
    # 0.58%, 0.75% and 8.2% when written; the middle one is what a row of exactly D bytes costs.
    assert by_row < by_block < 1.4 * by_row
    assert by_table > 8 * by_block


@pytest.mark.parametrize(
    "change",
    [
        {"scale": None},
        {"scale": torch.ones(16, 2)},
        {"scale": torch.ones(16).half()},
        {"scale_shift": 1},
        {"data": torch.zeros(2, 20, dtype=torch.uint8)},
    ],
)
def test_unusable_blocks_are_refused(change):
    good = {
        "data": torch.zeros(2, 32, dtype=torch.uint8),
        "weight_type": BLOCK_INT8,
        "dim": 20,
        "scale": torch.ones(16),
    }
    TableRows(**good)
    with pytest.raises(UserError, match="int8b rows"):
        TableRows(**(good | change))
