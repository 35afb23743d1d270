"""``tessera::dense_steps`` against its slow form."""

import math

import pytest
import torch

from tessera.kernels.dense_steps import NO_STEP, Step, slow_dense_steps
from tessera.kernels.libraries import load_libraries

load_libraries(["tessera_ops"])

ODD = [0.0, -0.0, 1.5, -1.5, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan, 16777217.0]


def check(device, values, steps):
    steps = torch.tensor(steps, dtype=torch.float64)
    found = torch.ops.tessera.dense_steps(values.to(device), steps.to(device)).cpu()
    expected = slow_dense_steps(values, steps)
    assert found.shape == values.shape
    assert torch.equal(found.nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0))
    assert torch.equal(torch.signbit(found[found == 0]), torch.signbit(expected[found == 0]))


@pytest.mark.parametrize(
    "step",
    [
        NO_STEP,
        (Step.FILL, 0.1, 0),
        (Step.CLIP, -1.1, 5.3),
        (Step.CLIP, -math.inf, 2),
        (Step.LOG1P, 0, 0),
        (Step.SCALE, 0.3, 1.7),
    ],
)
def test_each_step_is_its_formula(device, step):
    check(device, torch.tensor(ODD).view(-1, 1), [[step]])


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (2, 13), (5000, 5)])
def test_columns_have_steps_of_their_own(device, rows, columns):
    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=generator) * 100
    values[torch.rand(rows, columns, generator=generator) < 0.1] = math.nan
    kinds = torch.randint(0, len(Step), (4, columns), generator=generator).tolist()
    steps = [[(kind, 0.5 * place, 3.25) for place, kind in enumerate(row)] for row in kinds]
    check(device, values, steps)
    check(device, values.t().contiguous().t(), steps)
    # Columns of wider rows, as those of packed ones are.
    wider = torch.cat([values, values, values], dim=1)[:, columns : 2 * columns]
    check(device, wider, steps)


@pytest.mark.parametrize(
    ("values", "steps", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(1, 2, 3, dtype=torch.float64), "steps: contiguous float64"),
        (torch.zeros(2, 3), torch.zeros(1, 3, 3), "steps: contiguous float64"),
        (torch.zeros(2, 3).double(), torch.zeros(1, 3, 3).double(), "values: a float32 matrix"),
        (torch.zeros(2, 1), torch.full((1, 1, 3), 5.0).double(), "unknown kind 5"),
        (torch.zeros(2, 1), torch.full((1, 1, 3), 0.5).double(), "unknown kind 0.5"),
        (torch.zeros(2, 1), torch.full((1, 1, 3), math.nan).double(), "unknown kind nan"),
    ],
)
def test_what_does_not_fit_is_refused(values, steps, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.tessera.dense_steps(values, steps)


@pytest.mark.gpu
def test_a_gpu_takes_an_unknown_kind_as_none():
    steps = torch.tensor([[[7.0, 1, 1], [-1.0, 1, 1], [0.5, 1, 1]]], dtype=torch.float64)
    values = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(torch.ops.tessera.dense_steps(values.cuda(), steps.cuda()).cpu(), values)
