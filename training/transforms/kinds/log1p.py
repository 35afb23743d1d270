"""``log1p``: ``sign(x) * log(1 + |x|)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tessera.kernels.dense_steps import NO_STEP, Step
from tessera.training.transforms.transform import (
    DenseStage,
    DenseTransform,
    step_table,
    transform,
)


class _Stage(DenseStage):
    def steps(self) -> Tensor:
        return step_table(
            (float(Step.LOG1P), 0.0, 0.0) if own is not None else NO_STEP for own in self.settings
        )

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        # In float64: torch's float32 logarithm has other bits in vectors than alone, so that a
        # value's place in the batch would show.
        logs = torch.log1p(values.double().abs()).float()
        return self.chosen(torch.copysign(logs, values), values)


@transform
@dataclass(frozen=True, kw_only=True)
class Log1p(DenseTransform):
    """``sign(x) * log(1 + |x|)``, so that negative values are allowed."""

    name: ClassVar[str] = "log1p"
    stage: ClassVar[type[DenseStage]] = _Stage
