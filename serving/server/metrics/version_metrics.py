"""The metrics of repositories: what state each version is in, and how loads ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Protocol

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tessera.serving.repository.plan import VersionState
from tessera.serving.server.metrics.follow_metrics import FollowMetrics
from tessera.serving.server.metrics.histogram import Histogram
from tessera.serving.server.metrics.model_metrics import ModelMetrics


class ShownVersion(Protocol):
    """What is shown of a version; see `IndexRow`."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> str:
        """Its own; empty: the model has none."""
        ...

    @property
    def state(self) -> VersionState:
        """The state that it is in."""
        ...

    @property
    def progress(self) -> float:
        """How much of its load is done, from 0 to 1."""
        ...


def _no_versions() -> Sequence[ShownVersion]:
    return ()


class ShadowResult(Enum):
    """What became of a call that a shadow was to compute, too: the ``result`` of ``tessera_shadow_calls_total``."""

    COMPARED = "compared"
    DROPPED = "dropped"
    FAILED = "failed"


DIFFERENCE_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class VersionMetrics:
    """Counts loads and what shadows do, and renders the index when somebody asks; owned by the event loop's thread.

    Attributes:
        index: gives every version of every model.
        follow: of the versions that follow their logs.
    """

    def __init__(self) -> None:
        self.index: Callable[[], Sequence[ShownVersion]] = _no_versions
        self.follow = FollowMetrics()
        self._loads: Counter[tuple[str, str]] = Counter()
        # By model and version of the shadow; by model, version and shadow's version.
        self._shadow_calls: dict[tuple[str, str], Counter[ShadowResult]] = {}
        self._differences: dict[tuple[str, str, str], Histogram] = {}

    def count_load(self, model: str, *, ok: bool) -> None:
        """A load of a version of ``model`` has ended."""
        for result in ("ok", "failed"):
            self._loads[model, result] += result == ("ok" if ok else "failed")

    def count_shadow(self, shadow: ModelMetrics, result: ShadowResult) -> None:
        """A call that ``shadow`` was to compute, too, has ended."""
        counts = self._shadow_calls.setdefault((shadow.model, shadow.version), Counter())
        counts[result] += 1

    def compare(self, model: ModelMetrics, shadow: ModelMetrics, differences: np.ndarray) -> None:
        """``shadow`` has given other scores than ``model``, by so much each."""
        place = (model.model, model.version, shadow.version)
        histogram = self._differences.setdefault(place, Histogram(DIFFERENCE_BUCKETS))
        buckets = np.searchsorted(DIFFERENCE_BUCKETS, differences)
        for bucket, count in enumerate(np.bincount(buckets, minlength=1).tolist()):
            histogram.counts[bucket] += count
        histogram.sum += float(np.nansum(differences))

    def forget(self, model: ModelMetrics) -> None:
        """End the series of a version."""
        self.follow.forget(model.model, model.version)
        self._shadow_calls.pop((model.model, model.version), None)
        for place in list(self._differences):
            if place[0] == model.model and model.version in place[1:]:
                del self._differences[place]

    def _collect_shadows(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            "tessera_shadow_calls",
            "Calls that a shadow was to compute, too, by what became of them",
            labels=("model", "version", "result"),
        )
        for place, counts in self._shadow_calls.items():
            for result in ShadowResult:
                calls.add_metric((*place, result.value), counts[result])
        differences = HistogramMetricFamily(
            "tessera_shadow_score_difference",
            "Absolute differences of a shadow's scores from those that were answered",
            labels=("model", "version", "shadow_version"),
        )
        for pair, histogram in self._differences.items():
            differences.add_metric(pair, histogram.cumulative(), histogram.sum)
        yield from (calls, differences)

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them."""
        state = GaugeMetricFamily(
            "tessera_model_state",
            "1 for the state that a version is in",
            labels=("model", "version", "state"),
        )
        progress = GaugeMetricFamily(
            "tessera_model_load_progress",
            "How much of a load is done, from 0 to 1",
            labels=("model", "version"),
        )
        for row in self.index():
            if not row.version:
                continue
            for each in VersionState:
                state.add_metric((row.model, row.version, each.value), float(each is row.state))
            if row.state is VersionState.LOADING:
                progress.add_metric((row.model, row.version), row.progress)
        loads = CounterMetricFamily(
            "tessera_model_loads",
            "Loads of versions of repositories, by how they ended",
            labels=("model", "result"),
        )
        for labels, count in sorted(self._loads.items()):
            loads.add_metric(labels, count)
        yield from (state, progress, loads)
        yield from self._collect_shadows()
        yield from self.follow.collect()
