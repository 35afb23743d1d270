"""The steps that ``tessera::dense_steps`` applies to dense values, and their slow form.

Shapes: ``B`` rows, ``F`` columns, ``S`` steps.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Step(enum.IntEnum):
    """What a step does to a value ``x`` with its settings ``a`` and ``b``.

    ``FILL``: ``a`` where ``x`` is NaN.  ``CLIP``: at least ``a`` and at most ``b``.  ``LOG1P``:
    ``sign(x) * log(1 + |x|)``.  ``SCALE``: ``(x - a) * b``.  ``NONE``: ``x``.
    """

    NONE = 0
    FILL = 1
    CLIP = 2
    LOG1P = 3
    SCALE = 4


NO_STEP = (float(Step.NONE), 0.0, 0.0)


def slow_dense_steps(values: Tensor, steps: Tensor) -> Tensor:
    """What the operator does, value by value: ``[B, F]`` float32 and ``[S, F, 3]`` float64."""
    rows = [
        [_applied(value, steps[:, column].tolist()) for column, value in enumerate(row)]
        for row in values.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float32).view(values.shape)


def _applied(value: float, steps: Sequence[Sequence[float]]) -> float:
    for kind, a, b in steps:
        low, high = _float32(a), _float32(b)
        if kind == Step.FILL and math.isnan(value):
            value = low
        elif math.isnan(value):
            continue
        elif kind == Step.CLIP:
            value = min(max(value, low), high)
        elif kind == Step.LOG1P:
            value = _float32(math.copysign(math.log1p(abs(value)), value))
        elif kind == Step.SCALE:
            value = _float32(_float32(value - low) * high)
    return value


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()
