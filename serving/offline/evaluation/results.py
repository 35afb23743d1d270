"""From the arrays of a pass to metrics with standard errors: of all rows, and of slices.

``N`` rows, ``M`` models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.serving.offline.evaluation.models import Scores
from tessera.serving.offline.evaluation.scoring import Scored
from tessera.training.data.columns import Task
from tessera.training.metrics.binary import BINARY_METRICS, CalibrationTable, calibration_table
from tessera.training.metrics.estimate import Estimate, codes_of
from tessera.training.metrics.ranking import GroupRanking
from tessera.training.metrics.regression import REGRESSION_METRICS

CALIBRATION_BINS = 20


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric, NaN where it is not defined, and its standard error, NaN where that is not known."""

    value: float
    standard_error: float

    def to_json(self) -> dict[str, float | None]:
        """Both numbers, None in the place of NaN."""
        return {name: None if math.isnan(one) else one for name, one in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A label's metrics on all rows, or on those of a slice.

    Attributes:
        label: the label's name.
        task: what it is.
        column: what the slice is cut by; None: all rows.
        value: the slice's name.
        rows: rows whose label is known.
        share: their share of all rows with this label.
        positives: rows with label 1; None of a regression label.
        mean_label: the (weighted) mean.
        models: for each model, its metrics by name.
        differences: for each model after the first, its metrics less the first one's, paired by row.
    """

    label: str
    task: Task
    column: str | None
    value: str | None
    rows: int
    share: float
    positives: int | None
    mean_label: float
    models: tuple[dict[str, Measured], ...]
    differences: tuple[dict[str, Measured], ...]


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was found.

    Attributes:
        overall: by label.
        slices: in the order of the columns, labels and slices.
        calibration: by label, for each model the table of its buckets.
        clusters: how many clusters the rows of the first label have; None: rows are their own.
        groups: how many groups there are; None: there is no column of them.
    """

    overall: dict[str, Part]
    slices: tuple[Part, ...]
    calibration: dict[str, tuple[CalibrationTable, ...]]
    clusters: int | None
    groups: int | None


def results_of(scored: Scored, ks: Sequence[int]) -> Results:
    """All metrics; ``ks`` are those of recall@k and NDCG@k."""
    overall: dict[str, Part] = {}
    slices: list[Part] = []
    tables: dict[str, tuple[CalibrationTable, ...]] = {}
    for label in scored.labels:
        chosen = _Rows.known(scored, label)
        overall[label] = chosen.part(scored, ks, total=len(chosen.places))
        binary = scored.tasks[label] == "binary"
        tables[label] = tuple(
            calibration_table(
                scores, chosen.labels(scored), chosen.weights(scored), bins=CALIBRATION_BINS
            )
            for scores in (chosen.scores(scored) if scored.probabilities or not binary else ())
        )
        for column, parts in scored.slices.items():
            for value, places in parts:
                own = chosen.within(scored, column, value, places)
                if len(own.places):
                    slices.append(own.part(scored, ks, total=len(chosen.places)))
    return Results(
        overall=overall,
        slices=tuple(slices),
        calibration=tables,
        clusters=None if scored.clusters is None else int(scored.clusters.max()) + 1,
        groups=_group_count(scored),
    )


def _group_count(scored: Scored) -> int | None:
    if scored.groups is None or scored.no_group is None:
        return None
    return len(np.unique(scored.groups[~scored.no_group]))


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of one label: the places of those that are known, in a slice."""

    label: str
    places: npt.NDArray[np.intp]
    column: str | None = None
    value: str | None = None

    @classmethod
    def known(cls, scored: Scored, label: str) -> _Rows:
        return cls(label=label, places=np.flatnonzero(~np.isnan(scored.labels[label])))

    def within(
        self, scored: Scored, column: str, value: str, places: npt.NDArray[np.intp]
    ) -> _Rows:
        known = places[~np.isnan(scored.labels[self.label][places])]
        return _Rows(label=self.label, places=known, column=column, value=value)

    def labels(self, scored: Scored) -> Scores:
        return scored.labels[self.label][self.places]

    def scores(self, scored: Scored) -> list[Scores]:
        return [own[self.label][self.places] for own in scored.scores]

    def weights(self, scored: Scored) -> npt.NDArray[np.float64] | None:
        return None if scored.weights is None else scored.weights[self.places]

    def part(self, scored: Scored, ks: Sequence[int], *, total: int) -> Part:
        task = scored.tasks[self.label]
        labels, weights = self.labels(scored), self.weights(scored)
        clusters = None
        if scored.clusters is not None:
            clusters = codes_of(scored.clusters[self.places])
        models: list[dict[str, Measured]] = [{} for _ in scored.scores]
        differences: list[dict[str, Measured]] = [{} for _ in scored.scores[1:]]
        for name, found, of_rows in self._estimates(scored, labels, weights, ks):
            own = clusters if clusters is None or of_rows is None else clusters[of_rows]
            for place, estimate in enumerate(found):
                models[place][name] = _measured(estimate, own)
            for place, estimate in enumerate(found[1:]):
                differences[place][name] = _measured(estimate.minus(found[0]), own)
        counted = weights is None or float(weights.sum()) > 0
        return Part(
            label=self.label,
            task=task,
            column=self.column,
            value=self.value,
            rows=len(labels),
            share=len(labels) / total,
            positives=int(np.count_nonzero(labels)) if task == "binary" else None,
            mean_label=float(np.average(labels.astype(np.float64), weights=weights))
            if counted
            else math.nan,
            models=tuple(models),
            differences=tuple(differences),
        )

    def _estimates(
        self, scored: Scored, labels: Scores, weights: Any, ks: Sequence[int]
    ) -> Iterator[tuple[str, list[Estimate], npt.NDArray[np.intp] | None]]:
        """Each metric by name, of every model, one after the other, as each takes 8 bytes a row.

        Also the rows that it looks at, of those here; None: all.
        """
        task = scored.tasks[self.label]
        metrics = BINARY_METRICS if task == "binary" else REGRESSION_METRICS
        if task == "binary" and not scored.probabilities:
            metrics = {"auc": BINARY_METRICS["auc"]}
        for name, metric in metrics.items():
            found = [metric(scores, labels, weights) for scores in self.scores(scored)]
            yield name, found, None
        if task != "binary" or scored.groups is None or scored.no_group is None:
            return
        of_rows = np.flatnonzero(~scored.no_group[self.places])
        groups = scored.groups[self.places][of_rows]
        weights = None if weights is None else weights[of_rows]
        rankings = [
            GroupRanking(scores[of_rows], labels[of_rows], groups, weights)
            for scores in self.scores(scored)
        ]
        yield "gauc", [one.gauc() for one in rankings], of_rows
        for k in ks:
            yield f"recall@{k}", [one.recall_at_k(k) for one in rankings], of_rows
            yield f"ndcg@{k}", [one.ndcg_at_k(k) for one in rankings], of_rows


def _measured(estimate: Estimate, clusters: npt.NDArray[np.int64] | None) -> Measured:
    return Measured(value=estimate.value, standard_error=estimate.standard_error(clusters))
