"""What only the CPU operators do: threads, instruction sets, interaction, refusing bad input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import reference
from tessera.kernels.plan import plan_column
from tessera.kernels.row_types import INT8
from tessera.kernels.tables import FeatureLookup, make_plan, pack_tables
from tests.instruction_sets import output_with
from tests.kernels.cases import calls, random_table

CHILD = """
import torch
from tests.kernels.cases import random_table
from tessera.kernels import ops
from tessera.kernels.tables import *
ops.load()
generator = torch.Generator().manual_seed(5)
packed = pack_tables([random_table(generator, 20, 77, kind) for kind in kernel_types()])
plan = make_plan(
    [FeatureLookup(table=p, out_column=77 * k) for k, p in enumerate(packed.places)]
)
lengths = torch.randint(0, 9, (7 * 7,), generator=generator)
indices = torch.randint(-2, 22, (int(lengths.sum()),), generator=generator)
factors = torch.randn(indices.numel(), generator=generator)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    out = torch.ops.tessera.lookup(
        packed.weights, plan, indices, lengths, 7 * 77, factors, dtype=dtype
    )
    print(out.view(torch.uint8).long().mul(torch.arange(1, 1 + out.view(torch.uint8).shape[1]))
          .sum(1).tolist())
"""


def test_every_instruction_set_gives_the_same_bits():
    best = output_with("", CHILD)
    assert len(best) > 100
    assert output_with("scalar", CHILD) == best
    assert output_with("avx2", CHILD) == best


def test_threads_give_the_same_bits():
    generator = torch.Generator().manual_seed(6)
    packed = pack_tables([random_table(generator, 100, 64, INT8) for _ in range(3)])
    plan = make_plan(
        [FeatureLookup(table=p, out_column=64 * k) for k, p in enumerate(packed.places)]
    )
    lengths = torch.randint(0, 30, (3 * 100,), generator=generator)
    indices = torch.randint(-5, 105, (int(lengths.sum()),), generator=generator)
    dense = torch.randn(100, 64, generator=generator)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        counts = torch.zeros(3, dtype=torch.int64)
        call = (packed.weights, plan, indices, lengths)
        results.append(
            (
                torch.ops.tessera.lookup(*call, 192, outside=counts),
                torch.ops.tessera.lookup_dot_interaction(*call, dense),
                counts,
            )
        )
    torch.set_num_threads(1)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@settings(max_examples=60)
@given(
    batch=st.integers(0, 4),
    count=st.integers(0, 30),
    dim=st.sampled_from([1, 3, 8, 16, 17, 64, 100, 128]),
    upper=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_interaction_equals_float64(batch, count, dim, upper, seed):
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(batch, dim, generator=generator)
    sparse = torch.randn(batch, count * dim, generator=generator)
    ours = torch.ops.tessera.dot_interaction(dense, sparse, upper)
    expected = reference.dot_interaction(dense, sparse, upper=upper)
    # A float32 sum of dim products: its error is at most dim roundings of the sum of magnitudes.
    magnitudes = reference.dot_interaction(dense.abs(), sparse.abs(), upper=upper)
    assert ours.shape == expected.shape
    assert bool(((ours - expected).abs() <= (dim + 1) * 2**-24 * magnitudes).all())
    assert torch.equal(ours[:, :dim], dense)


def test_interaction_takes_rows_of_a_wider_buffer():
    wide = torch.randn(5, 8 + 3 * 8)
    ours = torch.ops.tessera.dot_interaction(wide[:, :8], wide[:, 8:])
    whole = torch.ops.tessera.dot_interaction(wide[:, :8].clone(), wide[:, 8:].clone())
    assert torch.equal(ours, whole)


@settings(max_examples=40)
@given(call=calls(dim=32), upper=st.booleans())
def test_fused_lookup_and_interaction_equal_the_two_steps(call, upper):
    features = call.plan.shape[0]
    plan = call.plan.clone()
    plan[:, plan_column("out_column")] = torch.arange(features) * 32
    batch = call.lengths.numel() // features
    dense = torch.randn(batch, 32)
    args = (call.tables.weights, plan, call.indices, call.lengths)
    pooled = torch.ops.tessera.lookup(*args, features * 32, call.id_weights)
    expected = torch.ops.tessera.dot_interaction(dense, pooled, upper)
    fused = torch.ops.tessera.lookup_dot_interaction(*args, dense, call.id_weights, upper=upper)
    assert torch.equal(fused, expected)


def good_call():
    packed = pack_tables([random_table(torch.Generator().manual_seed(0), 4, 8, INT8)])
    plan = make_plan([FeatureLookup(table=packed.places[0], out_column=0)])
    return {
        "weights": packed.weights,
        "plan": plan,
        "indices": torch.tensor([0, 3]),
        "lengths": torch.tensor([1, 1]),
        "width": 8,
    }


def plan_with(column, value):
    plan = good_call()["plan"].clone()
    plan[0, plan_column(column)] = value
    return plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.tensor([1, 2])}, "sum is 3 but there are 2"),
        ({"lengths": torch.tensor([3, -1])}, "-1 is negative"),
        ({"lengths": torch.tensor([1.0, 1.0])}, "lengths: a contiguous int32 or int64"),
        ({"lengths": torch.tensor([1, 0, 2]), "offsets": True}, "never fall"),
        ({"lengths": torch.tensor([0, 1, 3]), "offsets": True}, "the last is 3"),
        ({"lengths": torch.tensor([], dtype=torch.int64), "offsets": True}, "do not fit"),
        ({"indices": torch.tensor([[0, 3]])}, "indices: a contiguous"),
        ({"id_weights": torch.ones(3)}, "id_weights: 2"),
        ({"dense": torch.ones(2, 9)}, "dense: "),
        ({"outside": torch.zeros(2, dtype=torch.int64)}, "outside: contiguous int64 \\[1\\]"),
        ({"dtype": torch.float64}, "dtype: float32, float16 or bfloat16"),
        ({"weights": torch.zeros(40, dtype=torch.uint8)}, "reaches outside the weights' 40 bytes"),
        ({"width": 7}, "writes columns 0 to 8 of 7"),
        ({"plan": plan_with("data_offset", -1)}, "reaches outside"),
        ({"plan": plan_with("row_stride", 2**62)}, "reaches outside"),
        ({"plan": plan_with("rows", 5)}, "reciprocal"),
        ({"plan": plan_with("dim", 2**62)}, "outside|columns"),
        ({"plan": plan_with("weight_type", 7)}, "no kernel knows"),
        ({"plan": plan_with("weight_type", 6)}, "blocks without a book"),
        ({"plan": plan_with("scale_type", 3)}, "scale book without blocks"),
        ({"plan": plan_with("scale_offset", 2**63 - 1)}, "reaches outside"),
        ({"plan": plan_with("out_column", -1)}, "writes columns -1"),
        ({"plan": plan_with("scale_shift", 64)}, "no kernel knows"),
        ({"plan": plan_with("launch_order", 1)}, "no kernel knows"),
    ],
)
def test_bad_calls_are_refused(change, message):
    assert torch.ops.tessera.lookup(**good_call()).shape == (2, 8)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.lookup(**{**good_call(), **change})


def test_rows_of_another_width_are_refused():
    call = {**good_call(), "width": 16}
    with pytest.raises(RuntimeError, match="8 wide from column 0; lookup_rows needs 16"):
        torch.ops.tessera.lookup_rows(**call)


def test_interaction_of_another_width_is_refused():
    with pytest.raises(RuntimeError, match="a multiple of 8"):
        torch.ops.tessera.dot_interaction(torch.ones(2, 8), torch.ones(2, 12))
    with pytest.raises(RuntimeError, match="dense: a float32 matrix"):
        torch.ops.tessera.dot_interaction(torch.ones(2, 8).double(), torch.ones(2, 8))
