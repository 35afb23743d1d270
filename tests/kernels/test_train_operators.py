"""What training under bfloat16 computes beside products of matrices, on every device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.kernels import reference


def whole(*shape: int, most: int, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of products is exact until it is rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator).bfloat16()


@settings(max_examples=25, deadline=None)
@given(
    batch=st.sampled_from([0, 1, 7, 8, 9, 33]),
    count=st.sampled_from([1, 2, 7, 15, 16, 26, 31]),
    dim=st.sampled_from([8, 16, 56, 64, 128, 136, 320]),
    seed=st.integers(0, 2**20),
)
def test_the_interaction_and_its_gradient_equal_the_reference(device, batch, count, dim, seed):
    dense = whole(batch, dim, most=3, seed=seed)
    sparse = whole(batch, count * dim, most=3, seed=seed + 1)
    wide = [tensor.double().requires_grad_() for tensor in (dense, sparse)]
    expected = reference.dot_interaction(*wide)
    grad = whole(*expected.shape, most=2, seed=seed + 2)
    expected_grads = torch.autograd.grad(expected, wide, grad.float())
    there = dense.to(device), sparse.to(device)
    found = torch.ops.tessera.dot_interaction_bf16(*there)
    assert torch.equal(found.cpu(), expected.detach().bfloat16())
    grads = torch.ops.tessera.dot_interaction_bf16_backward(grad.to(device), *there)
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert torch.equal(ours.cpu(), theirs.bfloat16())


@settings(max_examples=25, deadline=None)
@given(
    rows=st.sampled_from([0, 1, 5, 64, 65, 700]),
    columns=st.sampled_from([8, 24, 128, 264, 520]),
    seed=st.integers(0, 2**20),
)
def test_a_relu_passes_the_gradient_of_what_it_passed(device, rows, columns, seed):
    grad = whole(rows, columns, most=4, seed=seed)
    output = whole(rows, columns, most=3, seed=seed + 1).relu()
    passed, sums = torch.ops.tessera.relu_backward_bf16(grad.to(device), output.to(device))
    expected = torch.where(output > 0, grad, 0)
    assert torch.equal(passed.cpu(), expected)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.cpu(), expected.float().sum(0))


@pytest.mark.parametrize(
    ("operator", "shapes", "message"),
    [
        ("dot_interaction_bf16", [(2, 12), (2, 24)], "dense: .* multiple of 8"),
        ("dot_interaction_bf16", [(2, 8), (2, 4)], "sparse: 1 to 31 vectors of 8"),
        ("dot_interaction_bf16", [(2, 8), (2, 256)], "sparse: 1 to 31 vectors"),
        ("dot_interaction_bf16", [(2, 8), (3, 8)], r"sparse: .*\[2, 8\]"),
        ("dot_interaction_bf16_backward", [(2, 8), (2, 8), (2, 8)], r"grad: .*\[2, 9\]"),
        ("relu_backward_bf16", [(2, 8), (3, 8)], r"grad: .*\[3, 8\]"),
        ("relu_backward_bf16", [(2, 7), (2, 7)], "output: .* multiple of 8"),
    ],
)
def test_what_does_not_fit_is_refused(device, operator, shapes, message):
    given = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.tessera, operator)(*given)


def test_other_types_and_rows_that_lie_apart_are_refused(device):
    dense = torch.zeros(2, 16, dtype=torch.bfloat16, device=device)
    with pytest.raises(RuntimeError, match="sparse: contiguous bfloat16"):
        torch.ops.tessera.dot_interaction_bf16(dense, dense.float())
    with pytest.raises(RuntimeError, match="dense: contiguous bfloat16"):
        torch.ops.tessera.dot_interaction_bf16(dense[:, :8], dense[:, :8].contiguous())
    with pytest.raises(RuntimeError, match="grad: it must start on a multiple of 16 bytes"):
        torch.ops.tessera.relu_backward_bf16(dense.flatten()[1:9].view(1, 8), dense[:1, :8])
