"""The metrics of followed versions: which commit they have, how fresh it is, what was put in and what was refused."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from tessera.serving.package.commit import REFUSALS
from tessera.serving.server.metrics.histogram import Histogram

_LABELS = ("model", "version")
APPLY_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Upper bounds in seconds."""


class FollowedVersion(Protocol):
    """What is shown of a version that follows its log."""

    @property
    def model(self) -> str:
        """The model's name."""
        ...

    @property
    def version(self) -> str:
        """The version's number."""
        ...

    @property
    def commit(self) -> int | None:
        """The number of its last commit; None: it follows no log."""
        ...

    @property
    def newest_example_s(self) -> float | None:
        """When its newest training example was made, seconds since 1970; None: not known."""
        ...


@dataclass(eq=False)
class _Counts:
    rows: int = 0
    apply: Histogram = field(default_factory=lambda: Histogram(APPLY_BUCKETS))
    refused: Counter[str] = field(default_factory=Counter)


class FollowMetrics:
    """Counts what the follower does; owned by the event loop's thread.

    Attributes:
        index: gives every version.
    """

    def __init__(self) -> None:
        self.index: Callable[[], Sequence[FollowedVersion]] = tuple
        self._counts: dict[tuple[str, str], _Counts] = {}

    def follow(self, model: str, version: str) -> None:
        """Show a version from now on."""
        self._counts.setdefault((model, version), _Counts())

    def count_commit(self, model: str, version: str, rows: int, seconds: float) -> None:
        """A commit of so many rows was put in, for which passes waited so long at most."""
        counts = self._counts.setdefault((model, version), _Counts())
        counts.rows += rows
        counts.apply.observe(seconds)

    def count_refusal(self, model: str, version: str, reason: str) -> None:
        """A commit was refused."""
        self._counts.setdefault((model, version), _Counts()).refused[reason] += 1

    def forget(self, model: str, version: str) -> None:
        """End the series of a version."""
        self._counts.pop((model, version), None)

    def collect(self) -> Iterator[Metric]:
        """The families, as `prometheus_client` asks for them."""
        commit = GaugeMetricFamily(
            "tessera_model_commit",
            "The commit of the state that answers, 0: the package itself",
            labels=_LABELS,
        )
        freshness = GaugeMetricFamily(
            "tessera_freshness_seconds",
            "How long ago the newest training example of the state that answers was made",
            labels=_LABELS,
        )
        now = time.time()
        for row in self.index():
            if row.commit is not None:
                commit.add_metric((row.model, row.version), row.commit)
                if row.newest_example_s is not None:
                    freshness.add_metric((row.model, row.version), now - row.newest_example_s)
        rows = CounterMetricFamily(
            "tessera_commit_rows", "Rows of tables that commits have changed", labels=_LABELS
        )
        apply = HistogramMetricFamily(
            "tessera_commit_apply_seconds",
            "How long batches waited while a commit was written and its golden answers computed",
            labels=_LABELS,
        )
        refused = CounterMetricFamily(
            "tessera_commits_refused",
            "Commits that were not taken, by reason",
            labels=(*_LABELS, "reason"),
        )
        for place, counts in self._counts.items():
            rows.add_metric(place, counts.rows)
            apply.add_metric(place, counts.apply.cumulative(), counts.apply.sum)
            for reason in REFUSALS:
                refused.add_metric((*place, reason), counts.refused[reason])
        yield from (commit, freshness, rows, apply, refused)
