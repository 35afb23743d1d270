"""Layers of e4m3 numbers on every device against their float64 references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.kernels import reference

FLOAT8 = torch.float8_e4m3fn


def drawn(*shape: int, seed: int, size: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return reference.to_float8(values)


def bias(columns: int, seed: int) -> Tensor:
    return torch.randn(columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def spaced(*scales: float) -> Tensor:
    """Scales as the operators take them; what is between them must not be read."""
    return torch.tensor([value for scale in scales for value in (scale, *[float("nan")] * 3)])


def check(found: Tensor, expected: Tensor, sums: Tensor, *, equal: float = 0.9) -> None:
    """Hold a result to its neighbours; all but a few must be the reference's rounding.

    ``sums`` are of the products' magnitudes, in the result's unit: a GPU keeps some 13 bits of what it
    adds up, and rounds a layer to bfloat16 where it has no kernel for the whole.
    """
    step = 2**-3 if found.dtype == FLOAT8 else 2**-7
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    found, expected = found.cpu().double(), expected.double()
    allowed = step * expected.abs() + step * 2**-6 + sums * 2**-8
    assert bool(((found - expected).abs() <= allowed).all())
    if found.numel() >= 64:
        share = float((found == expected).double().mean())
        assert share >= equal, f"{share} of {tuple(found.shape)}"


def layer(batch: int, outputs: int, inputs: int, seed: int) -> list[Tensor]:
    """Input, weight, bias and scales that make sums about as large as 16."""
    scales = spaced(2.0 ** (4 - (inputs.bit_length() + 1) // 2), 0.25)
    weight = drawn(outputs, inputs, seed=seed + 1, size=4.0)
    return [drawn(batch, inputs, seed=seed), weight, bias(outputs, seed + 2), scales]


@settings(max_examples=20, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 7, 128, 300]),
    outputs=st.sampled_from([1, 16, 48, 256]),
    inputs=st.sampled_from([1, 24, 64, 512]),
    has_bias=st.booleans(),
    relu=st.booleans(),
    dtype=st.sampled_from([FLOAT8, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
@example(batch=513, outputs=1024, inputs=3456, has_bias=True, relu=True, dtype=FLOAT8, seed=1)
def test_a_layer_equals_the_reference(device, batch, outputs, inputs, has_bias, relu, dtype, seed):  # noqa: PLR0917 (hypothesis draws them by name)
    x, weight, added, scales = layer(batch, outputs, inputs, seed)
    given = [x, weight, added if has_bias else None, scales]
    there = [None if tensor is None else tensor.to(device) for tensor in given]
    found = torch.ops.tessera.linear_fp8(*there, relu, dtype)
    sums = x.double().abs() @ weight.double().abs().t() * scales[::4].double().prod()
    # Long sums lose bits on a GPU; a product that is rounded to bfloat16 first, as those of odd sizes are on a GPU.
    whole = outputs % 16 == inputs % 16 == 0
    equal = 0.97 if device == "cpu" else 0.7 if whole else 0.5
    check(found, reference.linear_fp8(*given, relu, dtype), sums, equal=equal)


def operands(batch: int, width: int, rank: int, seed: int) -> list[Tensor]:
    """x0, x, v, weight, bias and scales; results are about as large as 16."""
    x0, x = (drawn(batch, width, seed=seed + number, size=4.0) for number in (0, 1))
    scales = spaced(2.0 ** -((rank.bit_length() + 1) // 2), 0.5)
    weight = drawn(width, rank, seed=seed + 3)
    return [x0, x, drawn(batch, rank, seed=seed + 2), weight, bias(width, seed + 4), scales]


def check_cross(found: Tensor, given: list[Tensor]) -> None:
    x0, _, v, weight, added, scales = given
    whole = found.shape[1] % 64 == v.shape[1] % 128 == 0
    sums = (v.double().abs() @ weight.double().abs().t() * scales[0] + added.double().abs()) * (
        x0.double().abs()
    )
    check(found, reference.cross_layer_fp8(*given), sums, equal=0.9 if whole else 0.5)


@settings(max_examples=15, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 7, 128, 129, 300]),
    width=st.sampled_from([1, 7, 24, 64, 128, 192, 320]),
    rank=st.sampled_from([1, 16, 128, 256, 512, 640]),
    same=st.booleans(),
    seed=st.integers(0, 2**20),
)
# On a GPU of 132 multiprocessors 2 and 3 tiles a block, whose pieces go round the ring.
@example(batch=700, width=3456, rank=512, same=False, seed=1)
@example(batch=1100, width=3456, rank=384, same=True, seed=2)
def test_a_cross_layer_equals_the_reference(device, batch, width, rank, same, seed):  # noqa: PLR0917 (hypothesis draws them by name)
    given = operands(batch, width, rank, seed)
    there = [tensor.to(device) for tensor in given]
    if same:
        given[1], there[1] = given[0], there[0]
    check_cross(torch.ops.tessera.cross_layer_fp8(*there), given)


@pytest.mark.parametrize("kept", [0.3, 128.0, 256.0, 2.0**-12])
def test_what_is_kept_of_x_may_be_any_share(device, kept):
    given = operands(300, 192, 128, 7)
    given[1] = drawn(300, 192, seed=8, size=min(4.0, 64.0 / kept))
    given[5] = spaced(float(given[5][0]), kept)
    check_cross(torch.ops.tessera.cross_layer_fp8(*(tensor.to(device) for tensor in given)), given)


@pytest.mark.parametrize("kept", [0.5, 0.3])
def test_nothing_times_a_large_sum_is_nothing(device, kept):
    """A sum of 512 products of the largest numbers is 1e8, which half precision does not have."""
    x0, x, v, weight, added, _ = operands(70, 128, 512, 9)
    x0[:, ::2] = 0
    v.fill_(448.0)
    weight.fill_(448.0)
    given = [x0, x, v, weight, added, spaced(1.0, kept)]
    found = torch.ops.tessera.cross_layer_fp8(*(tensor.to(device) for tensor in given))
    expected = reference.cross_layer_fp8(*given)
    assert torch.equal(found.cpu().float(), expected.float())


@pytest.mark.parametrize("shift", [16, 3])
def test_rows_may_lie_apart(device, shift):
    given = operands(200, 256, 128, 5)
    there = [tensor.to(device) for tensor in given]
    for number in range(3):
        wide = torch.zeros(200, given[number].shape[1] + shift, dtype=FLOAT8, device=device)
        wide[:, shift:] = there[number]
        there[number] = wide[:, shift:]
    check_cross(torch.ops.tessera.cross_layer_fp8(*there), given)
    _, weight, added, scales = layer(200, 64, 128, 6)
    found = torch.ops.tessera.linear_fp8(
        there[2], weight.to(device), added.to(device), scales.to(device)
    )
    expected = reference.linear_fp8(given[2], weight, added, scales)
    sums = given[2].double().abs() @ weight.double().abs().t() * scales[::4].double().prod()
    check(found, expected, sums, equal=0.5)


def test_what_is_too_large_becomes_the_largest(device):
    x, weight, added, scales = (tensor.to(device) for tensor in layer(64, 64, 128, 7))
    found = torch.ops.tessera.linear_fp8(x, weight, added, scales * 16).float()
    assert float(found.abs().max()) == reference.LARGEST_FLOAT8
    given = [tensor.to(device) for tensor in operands(64, 128, 128, 8)]
    given[5] = given[5] * 256
    found = torch.ops.tessera.cross_layer_fp8(*given).float()
    assert float(found.abs().max()) == reference.LARGEST_FLOAT8


@pytest.mark.parametrize(
    ("number", "changed", "message"),
    [
        (0, torch.zeros(4, 64), r"x0: float8_e4m3fn \[4, 64\]"),
        (1, torch.zeros(3, 64).to(FLOAT8), r"x: float8_e4m3fn \[4, 64\]"),
        (2, torch.zeros(4, 9).to(FLOAT8), r"v: float8_e4m3fn \[4, 16\]"),
        (3, torch.zeros(63, 16).to(FLOAT8), r"weight: contiguous float8_e4m3fn \[64, inputs\]"),
        (4, torch.zeros(64), r"bias: contiguous bfloat16 \[64\]"),
        (5, torch.zeros(3), r"scales: contiguous float32 \[8\]"),
    ],
)
def test_what_does_not_fit_is_refused(device, number, changed, message):
    given = operands(4, 64, 16, 9)
    given[number] = changed
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.cross_layer_fp8(*(tensor.to(device) for tensor in given))


def test_other_types_of_results_are_refused(device):
    given = [tensor.to(device) for tensor in layer(4, 16, 16, 10)]
    with pytest.raises(RuntimeError, match="dtype: float8_e4m3fn or bfloat16 is needed, got Half"):
        torch.ops.tessera.linear_fp8(*given, False, torch.float16)
