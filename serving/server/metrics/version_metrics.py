"""The metrics of repositories: what state each version is in, and how loads ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tessera.serving.repository.plan import VersionState


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
        """Its state."""
        ...

    @property
    def progress(self) -> float:
        """How much of its load is done, from 0 to 1."""
        ...


def _no_versions() -> Sequence[ShownVersion]:
    return ()


class VersionMetrics:
    """Counts loads, and renders the index when somebody asks; owned by the event loop's thread.

    Attributes:
        index: gives every version of every model.
    """

    def __init__(self) -> None:
        self.index: Callable[[], Sequence[ShownVersion]] = _no_versions
        self._loads: Counter[tuple[str, str]] = Counter()

    def count_load(self, model: str, *, ok: bool) -> None:
        """A load of a version of ``model`` has ended."""
        for result in ("ok", "failed"):
            self._loads[model, result] += result == ("ok" if ok else "failed")

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
