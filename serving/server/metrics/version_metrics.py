"""The metrics of repositories: what state each version is in, and how loads ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class ShadowRow:
    """What a shadow has computed of the calls that one version has answered.

    Attributes:
        model: the model's name.
        version: which answered.
        shadow_version: the shadow's.
        compared: calls whose scores were compared.
        dropped: calls for which there was no room, or no time.
        failed: calls that the shadow refused, or whose scores cannot be compared.
        mean: of the absolute differences of scores; NaN without any, as the quantiles.
        p50: their median.
        p99: their 99th percentile.
    """

    model: str
    version: str
    shadow_version: str
    compared: int
    dropped: int
    failed: int
    mean: float
    p50: float
    p99: float


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
        # Each by model, version that answered and shadow's version.
        self._shadow_calls: dict[tuple[str, str, str], Counter[ShadowResult]] = {}
        self._differences: dict[tuple[str, str, str], Histogram] = {}

    def count_load(self, model: str, *, ok: bool) -> None:
        """A load of a version of ``model`` has ended."""
        for result in ("ok", "failed"):
            self._loads[model, result] += result == ("ok" if ok else "failed")

    def count_shadow(self, model: ModelMetrics, shadow: ModelMetrics, result: ShadowResult) -> None:
        """A call to ``model`` that ``shadow`` was to compute, too, has ended."""
        place = (model.model, model.version, shadow.version)
        self._shadow_calls.setdefault(place, Counter())[result] += 1

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
        for series in (self._shadow_calls, self._differences):
            for place in list(series):
                if place[0] == model.model and model.version in place[1:]:
                    del series[place]

    def shadows(self) -> list[ShadowRow]:
        """What each shadow has computed of the calls of each version."""
        rows = []
        for place, calls in self._shadow_calls.items():
            differences = self._differences.get(place, Histogram(DIFFERENCE_BUCKETS))
            scores = differences.count()
            rows.append(
                ShadowRow(
                    *place,
                    compared=calls[ShadowResult.COMPARED],
                    dropped=calls[ShadowResult.DROPPED],
                    failed=calls[ShadowResult.FAILED],
                    mean=differences.sum / scores if scores else math.nan,
                    p50=differences.quantile(0.5),
                    p99=differences.quantile(0.99),
                )
            )
        return rows

    def _collect_shadows(self) -> Iterator[Metric]:
        calls = CounterMetricFamily(
            "tessera_shadow_calls",
            "Calls that a shadow was to compute, too, by what became of them",
            labels=("model", "version", "result"),
        )
        # Summed over the versions that have answered the shadow's calls.
        sums: dict[tuple[str, str], Counter[ShadowResult]] = {}
        for (model, _, shadow), counts in self._shadow_calls.items():
            sums.setdefault((model, shadow), Counter()).update(counts)
        for place, counts in sums.items():
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
            "1 for the state that the version is in",
            labels=("model", "version", "state"),
        )
        progress = GaugeMetricFamily(
            "tessera_model_load_progress",
            "How much of a load has been done, 0 to 1",
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
            "Loads of a repository's versions",
            labels=("model", "result"),
        )
        for labels, count in sorted(self._loads.items()):
            loads.add_metric(labels, count)
        yield from (state, progress, loads)
        yield from self._collect_shadows()
        yield from self.follow.collect()
