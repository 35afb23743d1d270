"""``tessera::linear_bf16``, the dense layer with bfloat16 weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import reference
from tessera.kernels.linear import BF16_INPUTS, BF16_OUTPUTS, pack_linear_bf16
from tests.instruction_sets import output_with

# Every edge at once: odd sizes, rows on both sides of each way through the kernels, subnormal
# weights, inputs, sums and biases, infinities and NaN.
CHILD = """
import hashlib
import torch
from tessera.kernels import ops
from tessera.kernels.linear import pack_linear_bf16
ops.load()
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)

def hard(*shape):
    plain = torch.randn(*shape, generator=generator)
    exponents = torch.randint(-140, 20, shape, generator=generator).float()
    small = plain.double() * 2.0 ** (exponents.double() / 1.9)
    kind = torch.randint(0, 12, shape, generator=generator)
    mixed = torch.where(kind < 6, plain.double(), small).float()
    mixed[kind == 7] = 0.0
    mixed[kind == 8] = -0.0
    return mixed

digest = hashlib.sha256()
for inputs, outputs in [(1, 1), (13, 70), (33, 16), (64, 200), (415, 31), (700, 48)]:
    weight = hard(outputs, inputs)
    packed = pack_linear_bf16(weight, hard(outputs))
    for rows in (1, 2, 3, 4, 5, 7, 16, 17, 31, 33, 49, 96, 97, 130):
        for relu in (False, True):
            x = hard(rows, inputs)
            if rows == 7:
                x[2, 0] = float("nan")
                x[3, -1] = float("inf")
                x[4] = -float("inf")
            out = torch.ops.tessera.linear_bf16(x, *packed, outputs, relu)
            out = out.masked_fill(out.isnan(), 0.123)
            digest.update(out.numpy().tobytes())
print(digest.hexdigest())
"""


def layer(inputs, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, torch.randn(outputs, generator=generator)


SIZES = st.one_of(
    st.integers(1, 70),
    st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 200, 511, 1023, 2047, 2048]),
)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(
        st.one_of(st.integers(0, 40), st.sampled_from([47, 48, 64, 95, 96, 97, 129])), SIZES, SIZES
    ),
    relu=st.booleans(),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_float64(shape, relu, with_bias, seed):
    rows, inputs, outputs = shape
    weight, bias = layer(inputs, outputs, seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed + 1))
    packed = pack_linear_bf16(weight, bias if with_bias else None)
    found = torch.ops.tessera.linear_bf16(x, *packed, outputs, relu)
    added = bias.double() if with_bias else torch.zeros(outputs, dtype=torch.float64)
    rounded_x, rounded_weight = x.bfloat16().double(), weight.bfloat16().double()
    magnitudes = rounded_x.abs() @ rounded_weight.abs().t() + added.abs()
    assert found.shape == (rows, outputs)
    # Of the rounded numbers: products are exact, and a sum of 32 passes at most 16 roundings in its
    # half, one of both halves and one for each sum of 32 that is added; each is of at most half a
    # unit of the largest partial sum.
    roundings = 16 + 1 + -(-inputs // 32)
    expected = rounded_x @ rounded_weight.t() + added
    expected = expected.relu() if relu else expected
    assert bool(((found - expected).abs() <= roundings * 2**-24 * magnitudes).all())
    # Of the numbers before rounding: both factors are off by at most 2^-8 of themselves.
    exact = x.double() @ weight.double().t() + added
    exact = exact.relu() if relu else exact
    of_factors = x.double().abs() @ weight.double().abs().t() * (2 * 2**-8 + 2**-16)
    assert bool(((found - exact).abs() <= of_factors + roundings * 2**-24 * magnitudes).all())


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 40),
    inputs=st.integers(1, 130),
    outputs=st.integers(1, 70),
    relu=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_the_reference_to_the_bit(rows, inputs, outputs, relu, seed):
    weight, bias = layer(inputs, outputs, seed)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed + 1))
    found = torch.ops.tessera.linear_bf16(x, *pack_linear_bf16(weight, bias), outputs, relu)
    assert torch.equal(found, reference.linear_bf16(x, weight, bias, relu=relu))


@pytest.mark.parametrize(("inputs", "outputs"), [(13, 512), (200, 1), (64, 70), (415, 33)])
def test_a_row_has_the_same_bits_in_every_batch(inputs, outputs):
    packed = pack_linear_bf16(*layer(inputs, outputs))
    x = torch.randn(211, inputs, generator=torch.Generator().manual_seed(2))
    whole = torch.ops.tessera.linear_bf16(x, *packed, outputs)
    for begin, end in [(0, 1), (7, 9), (100, 103), (3, 8), (11, 17), (20, 36), (5, 38), (90, 211)]:
        assert torch.equal(
            torch.ops.tessera.linear_bf16(x[begin:end], *packed, outputs), whole[begin:end]
        )


def test_every_instruction_set_gives_the_same_bits():
    best = output_with("", CHILD)
    assert len(best) == 65
    for name in ("avx512", "avx2", "scalar"):
        assert output_with(name, CHILD) == best, name


def test_threads_do_not_change_the_bits():
    packed = pack_linear_bf16(*layer(300, 300))
    x = torch.randn(500, 300)
    one = torch.ops.tessera.linear_bf16(x, *packed, 300)
    torch.set_num_threads(3)
    try:
        assert torch.equal(torch.ops.tessera.linear_bf16(x, *packed, 300), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 3, 20, 40])
def test_inputs_are_rounded_to_the_nearest_and_ties_to_even(rows):
    one = torch.tensor([[1.0]])
    # Neighbours of 1 are 2^-7 above and 2^-8 below.
    given = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 - 2**-9, -(1 + 2**-8), 3.4e38]
    expected = [1.0, 1 + 2**-6, 1 + 2**-7, 1.0, -1.0, float("inf")]
    for value, rounded in zip(given, expected, strict=True):
        x = torch.full((rows, 1), value)
        found = torch.ops.tessera.linear_bf16(x, *pack_linear_bf16(one, None), 1)
        assert found.flatten().tolist() == [rounded] * rows


@pytest.mark.parametrize("rows", [1, 5, 20, 40])
def test_subnormal_numbers_are_zeros_and_the_threads_mode_is_kept(rows):
    tiny = 2.0**-130
    packed = pack_linear_bf16(torch.full((1, 1), 2.0**100), None)
    x = torch.full((rows, 1), tiny)
    assert not torch.ops.tessera.linear_bf16(x, *packed, 1).any()
    # Torch's own sums still have subnormals afterwards.
    assert (torch.full((4,), tiny) * 0.5).tolist() == [tiny * 0.5] * 4


@pytest.mark.parametrize("rows", [2, 20, 40])
def test_what_is_no_number_or_infinite_stays_in_its_row(rows):
    weight = torch.ones(2, 40)
    weight[1] = -1.0
    x = torch.ones(rows, 40)
    x[0, 39] = float("nan")
    x[1, 3] = float("inf")
    found = torch.ops.tessera.linear_bf16(x, *pack_linear_bf16(weight, None), 2, True)
    assert found[0].isnan().all()
    assert found[1].tolist() == [float("inf"), 0.0]
    assert found[2:].tolist() == [[40.0, 0.0]] * (rows - 2)


def test_tiles_hold_pairs_of_the_weights_and_zeros():
    weight, bias = layer(37, 20)
    packed, packed_bias = pack_linear_bf16(weight, bias)
    assert packed.shape == (2, 2, BF16_INPUTS // 2, 2 * BF16_OUTPUTS)
    assert packed.dtype == torch.bfloat16
    for n, k in [(0, 0), (3, 5), (19, 36), (16, 31), (15, 32)]:
        tile = packed[n // 16, k // 32]
        assert tile[k % 32 // 2, 2 * (n % 16) + k % 2] == weight[n, k].bfloat16()
    assert int(packed.count_nonzero()) == 37 * 20
    assert torch.equal(packed_bias[:20], bias)
    assert not packed_bias[20:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(2, 32)}, "input: .* last of 2 blocks of 32"),
        ({"input": torch.zeros(2, 65)}, "input: "),
        ({"input": torch.zeros(2, 40).double()}, "input: a float32"),
        ({"input": torch.zeros(40, 2).t()}, "contiguous rows"),
        ({"weights": torch.zeros(2, 2, 16, 32)}, "weights: contiguous bfloat16"),
        ({"weights": torch.zeros(2, 2, 16, 16).bfloat16()}, "weights: "),
        ({"weights": torch.zeros(2, 2, 32, 16).bfloat16().transpose(2, 3)}, "weights: "),
        ({"bias": torch.zeros(16)}, r"bias: contiguous float32 \[32\]"),
        ({"outputs": 16}, "outputs: 16 do not end in the last of 2 groups of 16"),
        ({"outputs": 33}, "outputs: 33"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    call = {
        "input": torch.zeros(2, 40),
        "weights": torch.zeros(2, 2, 16, 32, dtype=torch.bfloat16),
        "bias": torch.zeros(32),
        "outputs": 20,
    }
    assert torch.ops.tessera.linear_bf16(**call).shape == (2, 20)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.linear_bf16(**(call | change))


def test_the_shape_function_holds():
    packed = pack_linear_bf16(*layer(5, 20))
    torch.library.opcheck(
        torch.ops.tessera.linear_bf16.default,
        (torch.randn(4, 5), *packed, 20),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_torchscript_calls_it():
    packed, bias = pack_linear_bf16(*layer(5, 20))

    class Calling(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.ops.tessera.linear_bf16(x, w, b, 20, True)

    x = torch.randn(3, 5)
    expected = torch.ops.tessera.linear_bf16(x, packed, bias, 20, True)
    assert torch.equal(torch.jit.script(Calling())(x, packed, bias), expected)
