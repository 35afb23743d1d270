"""Layers of few inputs or outputs on every device against their float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import reference

STEPS = {torch.float32: 2**-20, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
"""By type, the distance of neighbours; of float32 sums, what their order may change."""


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 7, 33, 300]),
    layer=st.sampled_from([(13, 512), (1, 1), (3, 7), (8, 33), (15, 1030), (256, 1), (77, 15)]),
    narrow=st.booleans(),
    relu=st.booleans(),
    dtype=st.sampled_from(list(STEPS)),
    seed=st.integers(0, 2**20),
)
def test_it_equals_the_reference(device, batch, layer, narrow, relu, dtype, seed):  # noqa: PLR0917 (hypothesis draws them by name)
    inputs, outputs = layer
    x = drawn(batch, inputs, seed=seed)
    x = x.bfloat16() if narrow else x
    weight, bias = drawn(outputs, inputs, seed=seed + 1), drawn(outputs, seed=seed + 2)
    scale = 4.0 if dtype == torch.float8_e4m3fn else 1.0
    given = (x, weight, bias)
    expected = reference.linear_thin(*given, relu, dtype, scale)
    found = torch.ops.tessera.linear_thin(
        *(tensor.to(device) for tensor in given), relu, dtype, scale
    )
    assert found.dtype == dtype
    found, expected = found.cpu().double(), expected.double()
    allowed = STEPS[dtype] * (expected.abs() + 2**-6)
    allowed += scale * 2**-20 * (x.double().abs() @ weight.double().abs().t() + 1)
    assert bool(((found - expected).abs() <= allowed).all())
    if batch > 0 and dtype != torch.float32:
        assert float((found == expected).double().mean()) >= 0.95


@pytest.mark.parametrize("layer", [(13, 32), (32, 2)])
def test_rows_may_lie_apart_and_nan_stays(device, layer):
    inputs, outputs = layer
    wide = drawn(9, inputs + 3, seed=3).to(device)
    wide[4, 5] = float("nan")
    weight, bias = drawn(outputs, inputs, seed=4).to(device), drawn(outputs, seed=5).to(device)
    found = torch.ops.tessera.linear_thin(wide[:, 3:], weight, bias, True)
    expected = reference.linear_thin(wide[:, 3:], weight, bias, relu=True)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert bool(found[4].isnan().all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 16), torch.ones(16, 16), torch.ones(16)), "fewer than 16 of either"),
        ((torch.ones(2, 4), torch.ones(16, 3), torch.ones(16)), "input: .* of 3 columns"),
        ((torch.ones(2, 3), torch.ones(16, 3), torch.ones(3)), r"bias: .*\[16\]"),
        (
            (torch.ones(2, 3), torch.ones(16, 3), torch.ones(16), False, torch.float16),
            "dtype: float32, bfloat16 or float8_e4m3fn",
        ),
        (
            (torch.ones(2, 3), torch.ones(16, 3), torch.ones(16), False, torch.float32, 2.0),
            "scale: only float8_e4m3fn",
        ),
    ],
)
def test_what_does_not_fit_is_refused(device, arguments, message):
    there = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.linear_thin(*there)
