"""What the status page shows: the last minute, from snapshots taken every second, and the last hour.

The histograms count since the start; the difference of two snapshots is what happened between
them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tessera.serving.server.errors import Code
from tessera.serving.server.front.freshness_graph import FreshnessGraph, FreshnessHistory
from tessera.serving.server.front.last_hour import STEP_S, LastHour, Plots, Point
from tessera.serving.server.metrics.histogram import Histogram
from tessera.serving.server.metrics.model_metrics import ModelMetrics
from tessera.serving.server.repository.model_versions import IndexRow

WINDOW_SECONDS = 60
MOST_FEATURES = 20
"""So many features of all models are shown with their counts, those with the most first."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    time: float
    durations: list[int]
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model's row.

    Attributes:
        name: what requests call it.
        version: the version that is loaded.
        state: ``ready``, ``loading``, or ``unloaded``.
        requests_per_second: over the window.
        failures_per_second: requests that got no scores, over the window.
        p50_ms: median latency over the window; NaN without requests.
        p99_ms: 99th percentile over the window; NaN without requests.
        queue_requests: waiting now.
        inflight_batches: being computed now.
        mean_batch_samples: since the start; NaN without batches.
    """

    name: str
    version: str
    state: str
    requests_per_second: float
    failures_per_second: float
    p50_ms: float
    p99_ms: float
    queue_requests: int
    inflight_batches: int
    mean_batch_samples: float


@dataclass(eq=False)
class _Past:
    """One model's snapshots of the last minute, its last hour, and the snapshot at the hour's last point."""

    minute: deque[_Snapshot]
    at_point: _Snapshot
    hour: LastHour


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatus:
    """A feature that was sent values unlike those of the training rows, since the start.

    Attributes:
        model: whose.
        version: of the model.
        feature: the feature's name.
        outside: values outside of what the training rows held.
        missing: dense values that were missing.
    """

    model: str
    version: str
    feature: str
    outside: int
    missing: int


class StatusPage:
    """Keeps a minute of snapshots per model, and an hour of points.

    Args:
        models: the models to show; the list may change.
        clock: seconds, monotonic.
        index: gives every version of every model.
    """

    def __init__(
        self,
        models: list[ModelMetrics],
        clock: Callable[[], float],
        index: Callable[[], list[IndexRow]] = list,
    ) -> None:
        self._index = index
        self._clock = clock
        self._models = models
        self._past: dict[ModelMetrics, _Past] = {}
        self._freshness = FreshnessHistory()
        self.tick()

    def tick(self) -> None:
        """Take a snapshot; to be called about once a second."""
        now = self._clock()
        past = {}
        for model in self._models:
            snapshot = _snapshot(model, now)
            own = self._past.get(model) or _Past(deque(), snapshot, LastHour())
            own.minute.append(snapshot)
            while now - own.minute[0].time > WINDOW_SECONDS:
                own.minute.popleft()
            if now - own.at_point.time >= STEP_S:
                own.hour.add(_point(model, own.at_point, snapshot))
                own.at_point = snapshot
            past[model] = own
        self._past = past  # without those that are shown no more
        self._freshness.note(self._index())

    def versions(self) -> list[IndexRow]:
        """Every version of every model as it is now; empty where no repository is served."""
        return self._index()

    def freshness(self) -> list[FreshnessGraph]:
        """How fresh the scores of versions that follow their logs were."""
        return self._freshness.graphs(self._index())

    def rows(self) -> list[ModelStatus]:
        """Every model as it is now."""
        now = self._clock()
        rows = []
        for model in self._models:
            past = self._past.get(model)
            rows.append(_row(model, past.minute[0] if past else _snapshot(model, now), now))
        return rows

    def hours(self) -> list[tuple[ModelMetrics, Plots]]:
        """The last hour of every model."""
        return [(model, past.hour.plots()) for model, past in self._past.items()]

    def features(self) -> list[FeatureStatus]:
        """The features with the most values that are missing or outside of what the training rows held."""
        found = []
        for model in self._models:
            model.look_at_features()
            outside = dict(zip(model.names.outside, model.outside_values, strict=True))
            missing = dict(zip(model.names.missing, model.missing_values, strict=True))
            found += [
                FeatureStatus(
                    model=model.model,
                    version=model.version,
                    feature=name,
                    outside=outside.get(name, 0),
                    missing=missing.get(name, 0),
                )
                for name in dict.fromkeys([*outside, *missing])
            ]
        found = [row for row in found if row.outside or row.missing]
        return sorted(found, key=lambda row: -row.outside - row.missing)[:MOST_FEATURES]


def _snapshot(model: ModelMetrics, now: float) -> _Snapshot:
    failures = sum(model.requests.values()) - model.requests[Code.OK]
    return _Snapshot(now, list(model.duration.counts), failures)


def _between(model: ModelMetrics, first: _Snapshot, second: _Snapshot) -> tuple[Histogram, float]:
    """The durations of what was answered between two snapshots, and the seconds between them."""
    window = Histogram(model.duration.bounds)
    window.counts = [
        count - before for count, before in zip(second.durations, first.durations, strict=True)
    ]
    return window, max(second.time - first.time, 1e-9)


def _point(model: ModelMetrics, first: _Snapshot, second: _Snapshot) -> Point:
    window, seconds = _between(model, first, second)
    return Point(
        p50_ms=window.quantile(0.5) * 1e3,
        p99_ms=window.quantile(0.99) * 1e3,
        failures_per_second=(second.failures - first.failures) / seconds,
    )


def _row(model: ModelMetrics, past: _Snapshot, now: float) -> ModelStatus:
    current = _snapshot(model, now)
    window, seconds = _between(model, past, current)
    batches = model.batch_samples.count()
    return ModelStatus(
        name=model.model,
        version=model.version,
        state="ready" if model.ready else "unloaded" if model.was_loaded else "loading",
        requests_per_second=window.count() / seconds,
        failures_per_second=(current.failures - past.failures) / seconds,
        p50_ms=window.quantile(0.5) * 1e3,
        p99_ms=window.quantile(0.99) * 1e3,
        queue_requests=model.queue_requests(),
        inflight_batches=model.inflight_batches(),
        mean_batch_samples=model.batch_samples.sum / batches if batches else math.nan,
    )
