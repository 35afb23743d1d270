"""``{quantile: BUCKETS}``: which of so many equally full buckets a value is in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tessera.training import field_checks as check
from tessera.training.modules.hashing import fmix64
from tessera.training.transforms.transform import DenseStage, DenseTransform, transform

SAMPLE_ROWS = 1 << 17
"""Rows of a column whose quantiles stand for those of all; of fewer rows, every one."""


class _Stage(DenseStage):
    def __init__(self, settings: Sequence[DenseTransform | None], names: Sequence[str]) -> None:
        super().__init__(settings, names)
        self.inner_F: Tensor
        self.offset_F: Tensor
        self.scale_F: Tensor
        self.missing_F: Tensor
        self.bounds_FQ: Tensor
        own = [one if isinstance(one, Quantile) else None for one in settings]
        self._buckets = [one.buckets if one else 1 for one in own]
        ids = [one is not None and one.to == "id" for one in own]
        self.constant("inner_F", [n - 1 for n in self._buckets], torch.int64)
        self.constant("offset_F", [1.0 if i else 0.5 for i in ids], torch.float32)
        scales = [1.0 if i else 1 / n for i, n in zip(ids, self._buckets, strict=True)]
        self.constant("scale_F", scales, torch.float32)
        self.constant("missing_F", [0.0 if i else float("nan") for i in ids], torch.float32)
        # A column's bounds between its buckets; behind them, +inf.
        bounds = torch.full((len(own), max(self._buckets) - 1), float("inf"))
        self.register_buffer("bounds_FQ", bounds)

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        found = torch.searchsorted(self.bounds_FQ, values.t().contiguous(), right=True).t()
        bucket = torch.minimum(found, self.inner_F)
        ranks = (bucket.float() + self.offset_F) * self.scale_F
        ranks = torch.where(torch.isnan(values), self.missing_F, ranks)
        return self.chosen(ranks, values)

    def accumulator(self) -> _Sample:
        return _Sample(self._buckets)


@transform
@dataclass(frozen=True, kw_only=True)
class Quantile(DenseTransform):
    """Values become their bucket, of several that each hold as many training rows.

    Attributes:
        buckets (buckets): how many there are.
        to: ``rank`` gives the bucket as a number between 0 and 1 (its middle); missing values stay
            missing.  ``id`` makes the column a feature with one id: the bucket, counted from 1, or 0
            where the value is missing.
    """

    name: ClassVar[str] = "quantile"
    stage: ClassVar[type[DenseStage]] = _Stage
    main: ClassVar[str] = "buckets"

    buckets: int
    to: Literal["rank", "id"] = "rank"

    def __post_init__(self) -> None:
        check.allowed(self, "buckets", lambda n: 2 <= n <= 4096, "give 2 to 4096")

    @property
    def rows(self) -> int | None:
        """Ids of the feature that the column becomes under ``to: id``."""
        return self.buckets + 1 if self.to == "id" else None


class _Sample:
    """A uniform sample of the rows, the same whatever their order; see `DenseAccumulator`.

    Kept are the rows whose mixed numbers are the smallest.
    """

    def __init__(self, buckets: Sequence[int]) -> None:
        self._buckets = buckets
        self._values = torch.empty(0, len(buckets))
        self._order = torch.empty(0, dtype=torch.int64)

    def update(self, values: Tensor, rows: Tensor) -> None:
        self._join(fmix64(rows), values)

    def merge(self, later: _Sample) -> None:
        self._join(later._order, later._values)

    def _join(self, more: Tensor, values: Tensor) -> None:
        order = torch.cat([self._order, more])
        values = torch.cat([self._values, values])
        if len(order) > SAMPLE_ROWS:
            order, kept = torch.sort(order, stable=True)
            order, values = order[:SAMPLE_ROWS].clone(), values[kept[:SAMPLE_ROWS]]
        self._order, self._values = order, values

    def state(self) -> dict[str, Tensor]:
        bounds = torch.full((len(self._buckets), max(self._buckets) - 1), float("inf"))
        for column, buckets in enumerate(self._buckets):
            known = self._values[:, column]
            known = known[~torch.isnan(known)].sort().values
            if len(known) and buckets > 1:
                # The first value of each bucket but the first: `buckets` parts as even as can be.
                firsts = torch.arange(1, buckets) * len(known) // buckets
                bounds[column, : buckets - 1] = known[firsts]
        return {"bounds_FQ": bounds}
