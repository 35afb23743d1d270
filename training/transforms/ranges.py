"""What the training rows hold of each dense column, before any transform.

A package carries it, so that a server can say how far the values that it is sent are from those that
the model has seen.  Shapes: ``B`` rows of a batch, ``F`` dense columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ColumnRange:
    """The raw values of one dense column.

    Attributes:
        least: the smallest finite value, float32; None where no row has one.
        most: the largest, likewise.
        missing: the share of rows without a value, from 0 to 1.
    """

    least: float | None
    most: float | None
    missing: float

    def to_json(self) -> dict[str, float | None]:
        """Plain values; ``ColumnRange(**...)`` is the inverse."""
        return {"least": self.least, "most": self.most, "missing": self.missing}


class RangeAccumulator:
    """Smallest and largest value and the number of missing ones, by column.

    Nothing depends on the order of the rows, nor on how they are spread over accumulators that are
    merged: the bits are the same.

    Args:
        columns: ``F``.
    """

    def __init__(self, columns: int) -> None:
        self.rows = 0
        self.missing_F = torch.zeros(columns, dtype=torch.int64)
        self.least_F = torch.full((columns,), math.inf)
        self.most_F = torch.full((columns,), -math.inf)

    def update(self, dense: Tensor) -> None:
        """Look at the rows ``[B, F]`` float32, NaN where a value is missing."""
        if not dense.numel():
            self.rows += dense.shape[0]
            return
        self.rows += dense.shape[0]
        self.missing_F += dense.isnan().sum(dim=0)
        finite = dense.isfinite()
        least = torch.where(finite, dense, math.inf).amin(dim=0)
        most = torch.where(finite, dense, -math.inf).amax(dim=0)
        self.least_F = torch.minimum(self.least_F, least)
        self.most_F = torch.maximum(self.most_F, most)

    def merge(self, other: RangeAccumulator) -> None:
        """Take over what another one has seen of other rows of the same columns."""
        self.rows += other.rows
        self.missing_F += other.missing_F
        self.least_F = torch.minimum(self.least_F, other.least_F)
        self.most_F = torch.maximum(self.most_F, other.most_F)

    def ranges(self) -> tuple[ColumnRange, ...]:
        """By column, in their order; empty where there was no row."""
        if not self.rows:
            return ()
        return tuple(
            ColumnRange(least=_finite(least), most=_finite(most), missing=missing / self.rows)
            for least, most, missing in zip(
                self.least_F.tolist(), self.most_F.tolist(), self.missing_F.tolist(), strict=True
            )
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def ranges_from_json(values: Sequence[Any]) -> tuple[ColumnRange, ...]:
    """What the `ColumnRange.to_json` of each column gave.

    Raises:
        TypeError: it is something else.
    """
    return tuple(ColumnRange(**own) for own in values)
