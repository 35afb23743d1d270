"""Latencies of many calls, in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.serving.client.arrays import Array


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
            return cls(calls=0, mean_ms=0, p50_ms=0, p90_ms=0, p99_ms=0, p999_ms=0, max_ms=0)
        p50, p90, p99, p999 = np.percentile(ms, [50, 90, 99, 99.9], method="inverted_cdf")
        return cls(
            calls=ms.size,
            mean_ms=float(ms.mean()),
            p50_ms=float(p50),
            p90_ms=float(p90),
            p99_ms=float(p99),
            p999_ms=float(p999),
            max_ms=float(ms.max()),
        )

    def __str__(self) -> str:
        return (
            f"{self.calls} calls: mean {self.mean_ms:.2f} ms, p50 {self.p50_ms:.2f} ms,"
            f" p90 {self.p90_ms:.2f} ms, p99 {self.p99_ms:.2f} ms,"
            f" p99.9 {self.p999_ms:.2f} ms, max {self.max_ms:.2f} ms"
        )
