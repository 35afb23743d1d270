"""The pass over the rows: what every model says of them, their labels, and the columns looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from tessera.errors import UserError
from tessera.serving.offline.evaluation.columns import Keys, Reader, Values, Weights
from tessera.serving.offline.evaluation.data import Label, Opened
from tessera.serving.offline.evaluation.models import Input, Scores
from tessera.training.data.batch import Batch
from tessera.training.data.columns import Task
from tessera.training.data.dataset import EpochOrder, View

Slices = dict[str, list[tuple[str, npt.NDArray[np.intp]]]]


@dataclass(frozen=True, kw_only=True)
class Looks:
    """Which columns the pass keeps, by the names that the user gave.

    Attributes:
        by: those that slices are cut by.
        group: whose equal values are ranked together.
        cluster: whose equal values are one cluster of the standard errors.
        weight: what a row counts.
        buckets: into how many buckets a numeric column of ``by`` is cut.
        top: how many values of any other column have a slice of their own.
    """

    by: tuple[str, ...] = ()
    group: str | None = None
    cluster: str | None = None
    weight: str | None = None
    buckets: int = 5
    top: int = 10

    def names(self) -> tuple[str, ...]:
        """All columns, each once."""
        others = (self.group, self.cluster, self.weight)
        return tuple(dict.fromkeys([*self.by, *(one for one in others if one is not None)]))


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What the pass kept; ``N`` rows were scored.

    Attributes:
        rows: ``N``.
        available: how many rows there are; more than ``N`` where it was bounded.
        labels: by label ``[N]`` float32, NaN where it is not known.
        scores: for each model by label ``[N]`` float32.
        tasks: by label.
        weights: ``[N]``; None: every row counts the same.
        groups: ``[N]`` codes; None: there is no column of groups.
        no_group: ``[N]``, where the group is missing.
        clusters: ``[N]`` codes; None: every row is its own cluster.
        slices: by column, the slices' names and the places of their rows.
        spans: which rows of the view were scored, as (start, stop) of each batch.
        probabilities: whether scores for binary labels are probabilities; otherwise they tell rows
            apart and no more, as the products of two towers do.
    """

    rows: int
    available: int
    labels: Mapping[str, Scores]
    scores: Sequence[Mapping[str, Scores]]
    tasks: Mapping[str, Task]
    weights: npt.NDArray[np.float64] | None
    groups: npt.NDArray[np.int64] | None
    no_group: npt.NDArray[np.bool_] | None
    clusters: npt.NDArray[np.int64] | None
    slices: Slices
    spans: Sequence[tuple[int, int]]
    probabilities: bool = True


def score(
    opened: Opened, looks: Looks, *, batch_size: int, max_rows: int, progress: bool = True
) -> Scored:
    """Let every model answer every row once.

    Memory: 4 bytes a row for each label and each score, 8 for each column of ``looks``, and 9 for groups
    and clusters.  The metrics then take up to 200 bytes a row with one model, and 70 more for each other.

    Args:
        opened: rows and models.
        looks: the columns to keep.
        batch_size: rows of a forward pass.
        max_rows: of more rows, batches evenly spread over them are scored; 0: all.
        progress: show a bar on a terminal.

    Raises:
        UserError: a column is missing or not of its kind, or a model gives no number.
    """
    spans = evenly_spread(len(opened.view), batch_size, max_rows)
    rows = sum(stop - start for start, stop in spans)
    kept = _Kept(opened, looks, rows)
    with tqdm(
        total=rows,
        unit="row",
        unit_scale=True,
        desc="Scoring",
        disable=None if progress else True,  # None: only on a terminal
    ) as bar:
        for batch in batches_at(opened.view, spans):
            kept.add(batch)
            bar.update(batch.size)
    return kept.scored(spans)


def evenly_spread(rows: int, batch_size: int, most: int) -> list[tuple[int, int]]:
    """Batches of ``rows`` rows as (start, stop): all, or so many of them that hold at most ``most``."""
    spans = [(start, min(start + batch_size, rows)) for start in range(0, rows, batch_size)]
    if not most or rows <= most:
        return spans
    if most < batch_size:
        return [(0, most)]
    wanted = most // batch_size
    places = np.linspace(0, len(spans) - 1, wanted).round().astype(int)
    return [spans[place] for place in np.unique(places)]


def batches_at(view: View, spans: Sequence[tuple[int, int]]) -> Iterator[Batch]:
    """The batches at these places of the view's own order, the next one read while one is used."""
    with (
        contextlib.closing(view.order(0, seed=None, threads=1)) as order,
        ThreadPoolExecutor(1, "tessera-evaluate") as pool,
    ):
        ahead = None
        for span in spans:
            made = pool.submit(_gathered, order, span)
            if ahead is not None:
                yield ahead.result()
            ahead = made
        if ahead is not None:
            yield ahead.result()


def _gathered(order: EpochOrder, span: tuple[int, int]) -> Batch:
    return order.gather(order.place(*span))


class _Kept:
    """The arrays of the pass."""

    def __init__(self, opened: Opened, looks: Looks, rows: int) -> None:
        self._opened, self._looks = opened, looks
        self._reader = Reader(opened, looks.names())
        dense = set(opened.columns.dense_names)
        dense |= {one.column for one in opened.columns.dense if one.column is not None}
        self._by = {
            name: Values(rows, name, numeric=name in dense, buckets=looks.buckets, top=looks.top)
            for name in looks.by
        }
        self._group = None if looks.group is None else Keys(rows)
        self._cluster = None if looks.cluster in {None, looks.group} else Keys(rows)
        self._weight = None if looks.weight is None else Weights(rows, looks.weight)
        self._labels = {one.name: np.empty(rows, np.float32) for one in opened.labels}
        self._scores = [
            {one.name: np.empty(rows, np.float32) for one in opened.labels} for _ in opened.inputs
        ]
        self._filled = 0

    def add(self, batch: Batch) -> None:
        part = slice(self._filled, self._filled + batch.size)
        labels = batch.labels.view(batch.size, -1).numpy()
        for label in self._opened.labels:
            self._labels[label.name][part] = labels[:, label.place]
        for number, given in enumerate(self._opened.inputs):
            self._answers(given, number, batch, part)
        values = self._reader.of(batch)
        for column, kept in self._by.items():
            kept.add(values[column])
        for keys, name in ((self._group, self._looks.group), (self._cluster, self._looks.cluster)):
            if keys is not None and name is not None:
                keys.add(values[name])
        if self._weight is not None and self._looks.weight is not None:
            self._weight.add(values[self._looks.weight])
        self._filled += batch.size

    def _answers(self, given: Input, number: int, batch: Batch, part: slice) -> None:
        answers = given.answers(batch)
        for label in self._opened.labels:
            scores = answers[label.outputs[number]]
            wrong = int(np.count_nonzero(~np.isfinite(scores)))
            if wrong:
                raise UserError(
                    f"{given.model.path}: gives no finite score for {wrong} of {len(scores)} rows from row"
                    f" {part.start + 1} on; train or package it again"
                )
            self._scores[number][label.name][part] = scores

    def scored(self, spans: Sequence[tuple[int, int]]) -> Scored:
        groups, no_group = (None, None) if self._group is None else self._group.codes()
        clusters = groups
        if self._cluster is not None:
            clusters, _ = self._cluster.codes()
        elif self._looks.cluster is None:
            clusters = None
        return Scored(
            rows=self._filled,
            available=len(self._opened.view),
            labels=self._labels,
            scores=self._scores,
            tasks={one.name: self._task(one) for one in self._opened.labels},
            weights=None if self._weight is None else self._weight.values(),
            groups=groups,
            no_group=no_group,
            clusters=clusters,
            slices={name: kept.slices() for name, kept in self._by.items()},
            spans=spans,
            probabilities=self._probabilities,
        )

    @property
    def _probabilities(self) -> bool:
        return all(given.model.probabilities for given in self._opened.inputs)

    def _task(self, label: Label) -> Task:
        """What a label is: as it was said, or binary where labels and scores look so.

        Raises:
            UserError: it has no rows, or one class alone.
        """
        labels = self._labels[label.name]
        known = labels[~np.isnan(labels)]
        if not len(known):
            raise UserError(
                f"label {label.name!r}: is not known for any row; give data that has it"
            )
        ones, zeros = int(np.count_nonzero(known == 1)), int(np.count_nonzero(known == 0))
        binary = ones + zeros == len(known)
        task: Task = label.task or "regression"
        if label.task is None and binary:
            inside = not self._probabilities or all(
                float(own[label.name].min()) >= 0 and float(own[label.name].max()) <= 1
                for own in self._scores
            )
            task = "binary" if inside else "regression"
        if task == "binary":
            self._check_binary(label, known, ones=ones, zeros=zeros)
        return task

    def _check_binary(self, label: Label, known: Any, *, ones: int, zeros: int) -> None:
        if ones + zeros < len(known):
            other = known[(known != 0) & (known != 1)][0]
            raise UserError(
                f"label {label.name!r}: has the value {other:g}, and a binary label is 0 or 1; give"
                " --task regression, or another --label"
            )
        if not ones or not zeros:
            raise UserError(
                f"label {label.name!r}: is {'1' if ones else '0'} in all {len(known):,} rows, and metrics of"
                " a binary label need both; give more rows, or another --label"
            )
        for number, own in enumerate(self._scores if self._probabilities else ()):
            scores = own[label.name]
            if float(scores.min()) < 0 or float(scores.max()) > 1:
                raise UserError(
                    f"{self._opened.inputs[number].model.path}: gives scores from {scores.min():.3g} to"
                    f" {scores.max():.3g} for the binary label {label.name!r}, which are not probabilities;"
                    " of a model that only ranks give the run, or package it anew; otherwise give"
                    " --task regression, or another --label"
                )
