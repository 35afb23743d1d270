"""``{missing: VALUE}``: a value for those that are missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.dense_steps import NO_STEP, Step
from tessera.training.transforms.transform import (
    DenseStage,
    DenseTransform,
    step_table,
    transform,
)


class _Stage(DenseStage):
    def __init__(self, settings: Sequence[DenseTransform | None], names: Sequence[str]) -> None:
        super().__init__(settings, names)
        self.fill_F: Tensor
        fills = [own.value if isinstance(own, Missing) else math.nan for own in settings]
        self.constant("fill_F", fills, torch.float32)

    def steps(self) -> Tensor:
        return step_table(
            (float(Step.FILL), own.value, 0.0) if isinstance(own, Missing) else NO_STEP
            for own in self.settings
        )

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        return torch.where(torch.isnan(values), self.fill_F, values)


@transform
@dataclass(frozen=True, kw_only=True)
class Missing(DenseTransform):
    """Missing values (NaN) become a number.

    Attributes:
        value: what they become.
    """

    name: ClassVar[str] = "missing"
    stage: ClassVar[type[DenseStage]] = _Stage
    main: ClassVar[str] = "value"

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise UserError(f"value={self.value}: give a finite number")
