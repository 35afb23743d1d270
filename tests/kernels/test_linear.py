"""``tessera::linear``, the dense layer of packages on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels.linear import NARROW_PANEL, PANEL, pack_linear
from tests.instruction_sets import output_with

CHILD = """
import torch
from tessera.kernels import ops
from tessera.kernels.linear import pack_linear
ops.load()
generator = torch.Generator().manual_seed(1)
for outputs in (7, 200):
    weight = torch.randn(outputs, 33, generator=generator)
    input = torch.randn(13, 33, generator=generator)
    out = torch.ops.tessera.linear(input, *pack_linear(weight, weight[:, 0]), outputs)
    print(out.view(torch.int32).tolist())
"""


def layer(inputs, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, torch.randn(outputs, generator=generator)


@settings(max_examples=80)
@given(
    shape=st.tuples(
        st.integers(0, 20),
        st.integers(1, 70),
        st.sampled_from([1, 5, 15, 16, 17, 63, 64, 65, 127, 128, 200]),
    ),
    relu=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_float64(shape, relu, with_bias, seed):
    rows, inputs, outputs = shape
    weight, bias = layer(inputs, outputs, seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed + 1))
    packed = pack_linear(weight, bias if with_bias else None)
    found = torch.ops.tessera.linear(x, *packed, outputs, relu)
    added = bias.double() if with_bias else torch.zeros(outputs, dtype=torch.float64)
    expected = x.double() @ weight.double().t() + added
    # One rounding per input, each of at most half a unit of the largest partial sum.
    magnitudes = x.double().abs() @ weight.double().abs().t() + added.abs()
    expected = expected.relu() if relu else expected
    assert found.shape == (rows, outputs)
    assert bool(((found - expected).abs() <= (inputs + 1) * 2**-24 * magnitudes).all())


@pytest.mark.parametrize(("inputs", "outputs"), [(13, 512), (200, 1), (64, 70)])
def test_a_row_has_the_same_bits_in_every_batch(inputs, outputs):
    packed = pack_linear(*layer(inputs, outputs))
    x = torch.randn(211, inputs, generator=torch.Generator().manual_seed(2))
    whole = torch.ops.tessera.linear(x, *packed, outputs)
    for begin, end in [(0, 1), (7, 9), (100, 103), (3, 8), (11, 17), (90, 211)]:
        assert torch.equal(
            torch.ops.tessera.linear(x[begin:end], *packed, outputs), whole[begin:end]
        )


def test_every_instruction_set_and_number_of_threads_gives_the_same_bits():
    best = output_with("", CHILD)
    assert len(best) > 1000
    assert output_with("scalar", CHILD) == best
    assert output_with("avx2", CHILD) == best
    packed = pack_linear(*layer(300, 300))
    x = torch.randn(500, 300)
    one = torch.ops.tessera.linear(x, *packed, 300)
    torch.set_num_threads(3)
    try:
        assert torch.equal(torch.ops.tessera.linear(x, *packed, 300), one)
    finally:
        torch.set_num_threads(1)


def test_relu_keeps_what_is_no_number():
    packed = pack_linear(torch.tensor([[1.0], [-1.0]]), None)
    x = torch.tensor([[2.0], [float("nan")]])
    found = torch.ops.tessera.linear(x, *packed, 2, True)
    assert found[0].tolist() == [2.0, 0.0]
    assert found[1].isnan().all()


def test_panels_hold_the_weights_and_zeros():
    weight, bias = layer(3, 70)
    packed, packed_bias = pack_linear(weight, bias)
    assert packed.shape == (2, 3, PANEL)
    assert torch.equal(packed.transpose(1, 2).reshape(-1, 3)[:70], weight)
    assert not packed[1, :, 6:].any()
    assert torch.equal(packed_bias[:70], bias)
    assert not packed_bias[70:].any()
    assert pack_linear(weight[:9], None)[0].shape == (1, 3, NARROW_PANEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(2, 4)}, "input: .* 3 columns"),
        ({"input": torch.zeros(2, 3).double()}, "input: a float32"),
        ({"input": torch.zeros(3, 2).t()}, "contiguous rows"),
        ({"weights": torch.zeros(1, 3, 20)}, "weights: .* a multiple of 16"),
        ({"weights": torch.zeros(3, 16)}, "weights: "),
        ({"bias": torch.zeros(15)}, r"bias: contiguous float32 \[32\]"),
        ({"outputs": 16}, "outputs: 16 do not end in the last of 2 panels of 16"),
        ({"outputs": 33}, "outputs: 33"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    call = {
        "input": torch.zeros(2, 3),
        "weights": torch.zeros(2, 3, 16),
        "bias": torch.zeros(32),
        "outputs": 20,
    }
    assert torch.ops.tessera.linear(**call).shape == (2, 20)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.linear(**(call | change))


def test_the_shape_function_holds():
    packed = pack_linear(*layer(5, 20))
    torch.library.opcheck(
        torch.ops.tessera.linear.default,
        (torch.randn(4, 5), *packed, 20),
        test_utils=("test_schema", "test_faketensor"),
    )
