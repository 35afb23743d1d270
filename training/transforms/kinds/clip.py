"""``{clip: [LOW, HIGH]}``: values outside become the nearest bound."""

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
        self.low_F: Tensor
        self.high_F: Tensor
        bounds = [
            own.low_and_high if isinstance(own, Clip) else (-math.inf, math.inf) for own in settings
        ]
        self.constant("low_F", [low for low, _ in bounds], torch.float32)
        self.constant("high_F", [high for _, high in bounds], torch.float32)

    def steps(self) -> Tensor:
        return step_table(
            (float(Step.CLIP), *own.low_and_high) if isinstance(own, Clip) else NO_STEP
            for own in self.settings
        )

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        return torch.minimum(torch.maximum(values, self.low_F), self.high_F)


@transform
@dataclass(frozen=True, kw_only=True)
class Clip(DenseTransform):
    """Values outside become the nearest bound.

    Attributes:
        bounds: ``[LOW, HIGH]``; null leaves a side open.
    """

    name: ClassVar[str] = "clip"
    stage: ClassVar[type[DenseStage]] = _Stage
    main: ClassVar[str] = "bounds"

    bounds: tuple[float | None, float | None]

    def __post_init__(self) -> None:
        low, high = self.low_and_high
        if math.isnan(low) or math.isnan(high) or low > high:
            raise UserError(f"bounds={list(self.bounds)}: give [low, high] with low <= high")

    @property
    def low_and_high(self) -> tuple[float, float]:
        """Both bounds; infinite where a side is open."""
        low, high = self.bounds
        return -math.inf if low is None else low, math.inf if high is None else high
