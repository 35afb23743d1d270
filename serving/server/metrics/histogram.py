"""Counts of values by bucket, as Prometheus shows them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts per bucket; ``observe`` costs one bisection."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count ``value`` in the first bucket whose upper bound is not below it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bound as Prometheus writes it, and observations at or below it."""
        rows: list[tuple[str, int]] = []
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if math.isinf(bound) else repr(bound), total))
        return rows

    def quantile(self, fraction: float) -> float:
        """An estimate, linear inside its bucket; NaN without observations."""
        total = self.count()
        if total == 0:
            return math.nan
        rank = fraction * total
        below = 0
        lower = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count and below + count >= rank:
                return lower + (bound - lower) * (rank - below) / count
            below += count
            lower = bound
        return lower
