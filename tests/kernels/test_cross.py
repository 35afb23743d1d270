"""The cross layer on every device against its float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera.kernels import reference

NARROW = torch.bfloat16


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(NARROW)


def operands(batch: int, width: int, rank: int, seed: int) -> list[Tensor]:
    """x0, x, v, weight (whose products with v are about as large as 1) and bias."""
    weight = (drawn(width, rank, seed=seed + 3).float() / rank**0.5).to(NARROW)
    x0, x = (drawn(batch, width, seed=seed + number) for number in (0, 1))
    return [x0, x, drawn(batch, rank, seed=seed + 2), weight, drawn(width, seed=seed + 4)]


def check(found: Tensor, given: list[Tensor]) -> None:
    """Hold a result to a rounding of the layer's output, and to one of either result, to bfloat16."""
    x0, x, v, weight, bias = [tensor.cpu() for tensor in given]
    expected = reference.cross_layer(x0, x, v, weight, bias).double()
    sums = v.double().abs() @ weight.double().abs().t() + bias.double().abs()
    layer = v.double() @ weight.double().t() + bias.double()
    allowed = 2**-7 * expected.abs() + 2**-8 * (x0.double() * layer).abs()
    allowed += x0.double().abs() * sums * weight.shape[1] * 2**-24
    assert found.dtype == NARROW
    assert bool(((found.cpu().double() - expected).abs() <= allowed).all())


@settings(max_examples=15, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 7, 128, 129, 300]),
    width=st.sampled_from([1, 7, 24, 32, 96, 128, 160, 288]),
    rank=st.sampled_from([1, 8, 24, 64, 128, 512, 576]),
    same=st.booleans(),
    seed=st.integers(0, 2**20),
)
# On a GPU of 132 multiprocessors 2 and 3 tiles a block, whose pieces go round the ring.
@example(batch=700, width=3456, rank=512, same=False, seed=1)
@example(batch=1100, width=3456, rank=320, same=True, seed=2)
def test_it_equals_the_reference(device, batch, width, rank, same, seed):  # noqa: PLR0917 (hypothesis draws them by name)
    given = [tensor.to(device) for tensor in operands(batch, width, rank, seed)]
    if same:
        given[1] = given[0]
    check(torch.ops.tessera.cross_layer(*given), given)


@pytest.mark.parametrize(("batch", "width", "rank"), [(200, 256, 64), (5, 40, 16)])
def test_rows_may_lie_apart(device, batch, width, rank):
    given = [tensor.to(device) for tensor in operands(batch, width, rank, 5)]
    for number in range(3):
        wide = given[number].new_empty(batch, given[number].shape[1] + 8)
        wide[:, 8:] = given[number]
        given[number] = wide[:, 8:]
    check(torch.ops.tessera.cross_layer(*given), given)


def test_rows_that_begin_anywhere(device):
    given = [tensor.to(device) for tensor in operands(130, 128, 64, 6)]
    wide = given[0].new_empty(130, 131)
    wide[:, 3:] = given[0]
    given[0] = wide[:, 3:]
    check(torch.ops.tessera.cross_layer(*given), given)


@pytest.mark.parametrize(
    ("number", "changed", "message"),
    [
        (0, torch.zeros(4, 64), r"x0: bfloat16 \[4, 64\]"),
        (1, torch.zeros(3, 64, dtype=NARROW), r"x: bfloat16 \[4, 64\] .* got BFloat16 \[3, 64\]"),
        (2, torch.zeros(4, 9, dtype=NARROW), r"v: bfloat16 \[4, 8\]"),
        (3, torch.zeros(63, 8, dtype=NARROW), r"weight: contiguous bfloat16 \[64, inputs\]"),
        (4, torch.zeros(8, dtype=NARROW), r"bias: contiguous bfloat16 \[64\]"),
    ],
)
def test_what_does_not_fit_is_refused(device, number, changed, message):
    given = operands(4, 64, 8, 7)
    given[number] = changed
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.cross_layer(*(tensor.to(device) for tensor in given))
