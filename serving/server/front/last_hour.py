"""A model's last hour as two small plots of the status page: latency, and requests without scores."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

STEP_S = 20
POINTS = 3600 // STEP_S

_HEIGHT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What happened in one step; NaN where there was nothing."""

    p50_ms: float
    p99_ms: float
    failures_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plots:
    """The paths of the plots, for an SVG of ``POINTS`` x 40, and the largest value in each.

    Attributes:
        p50: the median latency's path.
        p99: the 99th percentile's, on the same scale.
        failures: that of requests without scores a second, on a scale of its own.
        most_ms: of latencies.
        most_failures: a second.
    """

    p50: str
    p99: str
    failures: str
    most_ms: float
    most_failures: float


class LastHour:
    """At most an hour's points."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=POINTS)

    def add(self, point: Point) -> None:
        """The next step has ended."""
        self._points.append(point)

    def plots(self) -> Plots:
        """What there is, now at the right."""
        most_ms = self._largest(lambda point: point.p99_ms)
        most_failures = self._largest(lambda point: point.failures_per_second)
        return Plots(
            p50=self._path(lambda point: point.p50_ms, most_ms),
            p99=self._path(lambda point: point.p99_ms, most_ms),
            failures=self._path(lambda point: point.failures_per_second, most_failures),
            most_ms=most_ms,
            most_failures=most_failures,
        )

    def _largest(self, value_of: Callable[[Point], float]) -> float:
        values = map(value_of, self._points)
        return max((value for value in values if not math.isnan(value)), default=0.0)

    def _path(self, value_of: Callable[[Point], float], most: float) -> str:
        """A line through what there is; nothing is drawn where nothing happened."""
        path, drawing = "", False
        for x, point in enumerate(self._points, POINTS - len(self._points)):
            value = value_of(point)
            if math.isnan(value):
                drawing = False
                continue
            height = _HEIGHT * value / most if most > 0 else 0.0
            path += f"{'L' if drawing else 'M'}{x} {_HEIGHT - height:.2f}"
            if not drawing:
                path += "h1"  # one point alone is seen, too
            drawing = True
        return path
