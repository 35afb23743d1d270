"""``standardize``: mean 0 and standard deviation 1 over the training rows."""

from __future__ import annotations

from collections.abc import Sequence
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

MAX_SCALE = 1e30


class _Stage(DenseStage):
    def __init__(self, settings: Sequence[DenseTransform | None], names: Sequence[str]) -> None:
        super().__init__(settings, names)
        self.mean_F: Tensor
        self.scale_F: Tensor
        self.register_buffer("mean_F", torch.zeros(len(settings)))
        self.register_buffer("scale_F", torch.ones(len(settings)))

    def steps(self) -> Tensor:
        fitted = zip(self.settings, self.mean_F.tolist(), self.scale_F.tolist(), strict=True)
        return step_table(
            (float(Step.SCALE), mean, scale) if own is not None else NO_STEP
            for own, mean, scale in fitted
        )

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        return self.chosen((values - self.mean_F) * self.scale_F, values)

    def accumulator(self) -> _Moments:
        return _Moments(len(self.settings))


@transform
@dataclass(frozen=True, kw_only=True)
class Standardize(DenseTransform):
    """Values minus their mean, divided by their standard deviation, both over the training rows.

    Missing and infinite values do not count.  A column of one value becomes 0.
    """

    name: ClassVar[str] = "standardize"
    stage: ClassVar[type[DenseStage]] = _Stage


class _Moments:
    """Mean and variance of columns, batch by batch; see `DenseAccumulator`.

    Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing
    Sample Variances" (1979).
    """

    def __init__(self, columns: int) -> None:
        self._count = torch.zeros(columns, dtype=torch.float64)
        self._mean = torch.zeros(columns, dtype=torch.float64)
        self._squares = torch.zeros(columns, dtype=torch.float64)

    def update(self, values: Tensor, rows: Tensor) -> None:  # noqa: ARG002 - see `DenseAccumulator`
        finite = torch.isfinite(values)
        count = finite.sum(dim=0).double()
        some = torch.where(finite, values.double(), 0.0)
        mean = some.sum(dim=0) / count.clamp(min=1)
        squares = torch.where(finite, (some - mean).square(), 0.0).sum(dim=0)
        self._join(count, mean, squares)

    def merge(self, later: _Moments) -> None:
        self._join(later._count, later._mean, later._squares)

    def _join(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        total = (self._count + count).clamp(min=1)
        apart = mean - self._mean
        self._squares += squares + apart.square() * (self._count * count / total)
        self._mean += apart * (count / total)
        self._count += count

    def state(self) -> dict[str, Tensor]:
        deviation = (self._squares / self._count.clamp(min=1)).sqrt()
        # The reciprocal of a tiny deviation would make float32's infinity of an ordinary value.
        scale = torch.where(deviation > 0, 1 / deviation, 1.0).clamp(max=MAX_SCALE)
        return {"mean_F": self._mean.float(), "scale_F": scale.float()}
