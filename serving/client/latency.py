"""Latencies of many calls, in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.serving.client.arrays import Array

_FIGURES = ("mean_ms", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """Percentiles of call latencies, in milliseconds; all zero when ``calls`` is 0."""

    calls: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float

    @classmethod
    def of_seconds(cls, latencies_s: Sequence[float] | Array) -> LatencySummary:
        """Summarise ``latencies_s``, one entry per call, in seconds.

        A percentile is the smallest latency that this share of all calls did not exceed, so it
        is a latency that was measured.
        """
        ms = np.asarray(latencies_s, dtype=np.float64) * 1e3
        if ms.size == 0:
            return cls(calls=0, **dict.fromkeys(_FIGURES, 0.0))
        percentiles = np.percentile(ms, [50, 90, 99, 99.9], method="inverted_cdf")
        figures = [ms.mean(), *percentiles, ms.max()]
        return cls(calls=ms.size, **dict(zip(_FIGURES, map(float, figures), strict=True)))

    def __str__(self) -> str:
        names = ("mean", "p50", "p90", "p99", "p99.9", "max")
        shown = zip(names, (getattr(self, figure) for figure in _FIGURES), strict=True)
        return f"{self.calls} calls: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in shown)
