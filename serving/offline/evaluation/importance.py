"""How much a model needs each column: what it loses when the column's values go to other rows.

Permutation importance (Breiman 2001; Fisher et al. 2019, "All models are wrong, but many are useful"): a
column is shuffled over the rows, everything else stays, and the model answers again.  Features that read
the same column are shuffled together, so that no row has two values of one column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from tessera.serving.offline.evaluation.data import Opened
from tessera.serving.offline.evaluation.models import Input, Scores
from tessera.serving.offline.evaluation.results import Measured
from tessera.serving.offline.evaluation.scoring import Scored, batches_at
from tessera.training.data.bags import bag_places
from tessera.training.data.batch import Batch, make_batch
from tessera.training.data.columns import FeatureColumns, Task
from tessera.training.metrics.binary import auc_estimate, log_loss
from tessera.training.metrics.estimate import Estimate, codes_of
from tessera.training.metrics.regression import mean_squared_error

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Importance:
    """What a model loses without what one column says.

    Attributes:
        model: the model's place.
        label: of which label.
        column: the column's name in the data.
        features: the features that read it.
        losses: by metric, how much worse it is on average: of a binary label ``auc`` and ``log_loss``, of a
            regression ``mean_squared_error``.  Above 0: the model needs the column.
    """

    model: int
    label: str
    column: str
    features: tuple[str, ...]
    losses: dict[str, Measured]


def importance_of(
    opened: Opened,
    scored: Scored,
    *,
    repeats: int,
    max_rows: int,
    seed: int,
    progress: bool = True,
) -> list[Importance]:
    """The importance of every column for every model, by label the largest loss first.

    The standard error has two parts: that of the rows, clustered as everywhere, and that of the
    shuffles, from their spread.

    Args:
        opened: rows and models.
        scored: the pass over them, whose rows these are.
        repeats: how often each column is shuffled.
        max_rows: of more rows that were scored, batches evenly spread over them are used; their raw values
            are held in memory.
        seed: of the shuffles.
        progress: show a bar on a terminal.
    """
    chosen = _choose(scored, max_rows)
    table = _Table.read(opened, [scored.spans[place] for place in chosen])
    rows = _places(scored, chosen)
    batch_size = max(stop - start for start, stop in scored.spans)
    sources = sources_of(opened.columns)
    used = [[s for s in sources if s.used_by(given)] for given in opened.inputs]
    found: list[Importance] = []
    with tqdm(
        total=len(rows) * sum(1 + repeats * len(own) for own in used),
        unit="row",
        unit_scale=True,
        desc="Shuffling columns",
        disable=None if progress else True,  # None: only on a terminal
    ) as bar:
        for number, (given, own) in enumerate(zip(opened.inputs, used, strict=True)):
            outputs = {label.name: label.outputs[number] for label in opened.labels}
            whole = _answers(given, outputs, table.batches(batch_size, None, None), bar)
            for source in own:
                shuffled = []
                for repeat in range(repeats):
                    # The same shuffles for every column and model: what differs is the column.
                    order = np.random.default_rng((seed, repeat)).permutation(len(rows))
                    batches = table.batches(batch_size, source, order)
                    shuffled.append(_answers(given, outputs, batches, bar))
                for label in outputs:
                    losses = _losses(
                        scored, label, rows, whole[label], [s[label] for s in shuffled]
                    )
                    found.append(
                        Importance(
                            model=number,
                            label=label,
                            column=source.column,
                            features=source.features,
                            losses=losses,
                        )
                    )
    places = {label: place for place, label in enumerate(scored.labels)}
    return sorted(found, key=lambda one: (one.model, places[one.label], -_first(one)))


def _first(one: Importance) -> float:
    value = next(iter(one.losses.values())).value
    return -math.inf if math.isnan(value) else value


@dataclass(frozen=True, kw_only=True)
class Source:
    """A column of the data and the features that read it, by their places in a batch."""

    column: str
    features: tuple[str, ...]
    dense: tuple[int, ...]
    sparse: tuple[int, ...]

    def used_by(self, given: Input) -> bool:
        """Whether a model takes one of the features."""
        dense, sparse = given.places()
        return bool({*self.dense} & {*dense} or {*self.sparse} & {*sparse})


def sources_of(columns: FeatureColumns) -> list[Source]:
    """The columns that features read, in the order of the first of them."""
    dense: dict[str, list[int]] = {}
    sparse: dict[str, list[int]] = {}
    names: dict[str, list[str]] = {}
    for place, one in enumerate(columns.dense):
        dense.setdefault(one.column or one.name, []).append(place)
        names.setdefault(one.column or one.name, []).append(one.name)
    for place, each in enumerate(columns.sparse):
        sparse.setdefault(each.column or each.name, []).append(place)
        names.setdefault(each.column or each.name, []).append(each.name)
    return [
        Source(
            column=column,
            features=tuple(features),
            dense=tuple(dense.get(column, ())),
            sparse=tuple(sparse.get(column, ())),
        )
        for column, features in names.items()
    ]


def _choose(scored: Scored, max_rows: int) -> list[int]:
    """The batches of the pass that are used, by their places."""
    sizes = [stop - start for start, stop in scored.spans]
    wanted = max(1, max_rows // max(sizes))
    places = np.linspace(0, len(sizes) - 1, min(wanted, len(sizes))).round().astype(int)
    return [int(place) for place in np.unique(places)]


def _places(scored: Scored, chosen: Sequence[int]) -> Rows:
    ends = np.cumsum([0, *(stop - start for start, stop in scored.spans)])
    parts = [np.arange(ends[place], ends[place + 1], dtype=np.int64) for place in chosen]
    return np.concatenate(parts)


def _answers(
    given: Input, outputs: Mapping[str, str], batches: Iterator[Batch], bar: Any
) -> dict[str, Scores]:
    parts: dict[str, list[Scores]] = {label: [] for label in outputs}
    for batch in batches:
        answers = given.answers(batch)
        for label, output in outputs.items():
            parts[label].append(answers[output])
        bar.update(batch.size)
    return {label: np.concatenate(own) for label, own in parts.items()}


def _losses(
    scored: Scored, label: str, rows: Rows, whole: Scores, shuffled: Sequence[Scores]
) -> dict[str, Measured]:
    labels = scored.labels[label][rows]
    known = ~np.isnan(labels)
    labels, rows = labels[known], rows[known]
    weights = None if scored.weights is None else scored.weights[rows]
    clusters = None if scored.clusters is None else codes_of(scored.clusters[rows])

    def losses(scores: Scores) -> dict[str, Estimate]:
        found = _estimates(scored.tasks[label], scores[known], labels, weights)
        if not scored.probabilities:
            found.pop("log_loss", None)
        return found

    before = losses(whole)
    after = [losses(scores) for scores in shuffled]
    found = {}
    for name, base in before.items():
        differences = [one[name].minus(base) for one in after]
        sign = -1.0 if name == "auc" else 1.0
        values = np.array([sign * one.value for one in differences])
        mean = Estimate(
            value=float(values.mean()),
            influence=np.mean([one.influence for one in differences], axis=0),
        )
        of_rows = mean.standard_error(clusters)
        of_shuffles = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
        found[name] = Measured(value=mean.value, standard_error=math.sqrt(of_rows**2 + of_shuffles))
    return found


def _estimates(
    task: Task, scores: Scores, labels: Scores, weights: npt.NDArray[np.float64] | None
) -> dict[str, Estimate]:
    if task == "regression":
        return {"mean_squared_error": mean_squared_error(scores, labels, weights)}
    return {
        "auc": auc_estimate(scores, labels, weights),
        "log_loss": log_loss(scores, labels, weights),
    }


class _Table:
    """The raw values of some rows, of which batches are made with one column in another order."""

    def __init__(self, columns: FeatureColumns, batches: Sequence[Batch]) -> None:
        self._keys = columns.sparse_names
        self._dense = torch.cat([batch.dense_features for batch in batches]).numpy()
        self._labels = torch.cat([batch.labels for batch in batches]).numpy()
        self._values: list[Rows] = []
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._starts: list[Rows] = []
        self._weights: list[npt.NDArray[np.float32]] | None = None
        if batches[0].sparse_features.weights_or_none() is not None:
            self._weights = []
        for key in self._keys:
            bags = [batch.sparse_features[key] for batch in batches]
            lengths = torch.cat([one.lengths() for one in bags]).numpy().astype(np.int32)
            self._values.append(torch.cat([one.values() for one in bags]).numpy())
            self._lengths.append(lengths)
            self._starts.append(np.cumsum(lengths, dtype=np.int64) - lengths)
            if self._weights is not None:
                self._weights.append(torch.cat([one.weights() for one in bags]).numpy())

    @classmethod
    def read(cls, opened: Opened, spans: Sequence[tuple[int, int]]) -> _Table:
        return cls(opened.columns, list(batches_at(opened.view, spans)))

    def batches(self, size: int, source: Source | None, order: Rows | None) -> Iterator[Batch]:
        """All rows in batches, the features of ``source`` taken from the rows of ``order``."""
        for start in range(0, len(self._dense), size):
            rows = np.arange(start, min(start + size, len(self._dense)))
            if source is None or order is None:
                yield self._batch(rows, set(), rows, ())
            else:
                yield self._batch(rows, set(source.sparse), order[rows], source.dense)

    def _batch(self, rows: Rows, sparse: set[int], others: Rows, dense: Sequence[int]) -> Batch:
        values, lengths, weights = [], [], []
        for place in range(len(self._keys)):
            own = others if place in sparse else rows
            bags = bag_places(self._starts[place][own], self._lengths[place][own])
            values.append(self._values[place][bags])
            lengths.append(self._lengths[place][own])
            if self._weights is not None:
                weights.append(self._weights[place][bags])
        columns = self._dense[rows]
        for place in dense:
            columns[:, place] = self._dense[others, place]
        return make_batch(
            dense=columns,
            keys=self._keys,
            lengths=np.concatenate([np.empty(0, np.int32), *lengths]),
            values=np.concatenate([np.empty(0, np.int64), *values]),
            labels=self._labels[rows],
            value_weights=np.concatenate(weights) if weights else None,
        )
