"""A model of `tessera train` as a module that is packaged like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tessera.serving.package.fields import is_printable
from tessera.serving.package.schema import DenseRange, OtherRole
from tessera.serving.packaging.evaluate import LabelledBatch
from tessera.serving.packaging.inputs import ModelInputs, RawColumn
from tessera.serving.packaging.source import SampleBatch, Source
from tessera.training.data.batch import Batch
from tessera.training.data.columns import FeatureColumns, ServedTask
from tessera.training.models.inputs import SparseFeature
from tessera.training.models.ranking import RankingModel
from tessera.training.models.retrieval import TowerModel, TowerSide, tower_model
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.ranges import ColumnRange

RANK_ONLY = "rank rows, not probabilities"
"""What a manifest's ``source`` says under ``scores`` where these are not probabilities."""

_SAMPLES = 2
_MOST_OTHERS = 10_000


class Ranking(Protocol):
    """What takes raw features and gives logits: one `RankingModel`, or several.

    Attributes:
        dense_names: the data's dense features, in column order.
        labels: what is predicted, in the order of the logits.
        scores: what the outputs are; see `ModelConfig.scores`.
    """

    dense_names: tuple[str, ...]
    labels: tuple[str, ...]
    scores: Literal["logits", "raw"]

    def data_features(self) -> tuple[SparseFeature, ...]:
        """The sparse features that a call is given."""

    def __call__(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor, /) -> Any:
        """Raw values and ids to logits, ``[B]`` or ``[B, L]``."""


class ServedRanking(nn.Module):
    """A ranking model with the heads that it is served with: logits become probabilities.

    Args:
        model: it has one label or several.
        tasks: what each output is; None: all are binary.  Others are served as they are.
    """

    def __init__(self, model: Ranking, tasks: Sequence[ServedTask] | None = None) -> None:
        super().__init__()
        self.model = model
        if tasks is None:
            tasks = served_tasks(model)
        self._tasks = dict(zip(model.labels, tasks, strict=True))

    def forward(self, dense: Tensor, *ids: KeyedJaggedTensor) -> Tensor | dict[str, Tensor]:
        """Score a batch: ``dense`` ``[B, F_dense]`` raw float32, NaN where missing, and raw ids.

        The ids are those of the features without weights, of those with weights, or of both groups in
        this order; or of all features in one.  Returns the score of the one label, ``[B]``
        float32, or the scores of several by their names, each ``[B]``.
        """
        sparse = ids[0] if len(ids) == 1 else _joined(*ids)
        outputs = self.model(dense, sparse)
        if len(self._tasks) == 1:
            return _score(outputs, *self._tasks.values())
        return {
            name: _score(outputs[:, place], task)
            for place, (name, task) in enumerate(self._tasks.items())
        }


def _score(output: Tensor, task: ServedTask) -> Tensor:
    return torch.sigmoid(output) if task == "binary" else output


def _joined(plain: KeyedJaggedTensor, scored: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Both groups in one, as the model's collections take them: an id without a weight has 1."""
    ones = torch.ones_like(plain.values(), dtype=torch.float32)
    return KeyedJaggedTensor(
        plain.keys() + scored.keys(),
        torch.cat([plain.values().long(), scored.values().long()]),
        torch.cat([ones, scored.weights()]),
        lengths=torch.cat([plain.lengths(), scored.lengths()]),
    )


def served_tasks(model: Ranking, columns: FeatureColumns | None = None) -> list[ServedTask]:
    """What the outputs for the model's labels are; without ``columns`` all labels are binary."""
    tasks: list[ServedTask] = ["binary"] * len(model.labels)
    if columns is not None:
        tasks = [label.task for label in columns.labels]
    if model.scores == "raw":
        return ["score" if task == "binary" else task for task in tasks]
    return tasks


def ranking_source(
    model: Ranking,
    columns: FeatureColumns | None = None,
    ranges: Sequence[ColumnRange] = (),
) -> Source:
    """The float32 ``model`` with its served heads, what its inputs are called, and a sample batch.

    ``columns`` says where a row of raw values holds each feature, and what the labels' tasks are; None:
    under the feature's name, as numbers, and binary labels.  ``ranges`` are what the training rows
    held of each dense feature; empty: that is not known.
    """
    module = ServedRanking(model, served_tasks(model, columns))
    inputs, sample = _given(model, columns, ranges)
    return module, inputs, sample


class ServedTower(nn.Module):
    """One tower of a model for retrieval, as it is packaged.

    Args:
        tower: from raw values of its side to vectors ``[B, D]``.
    """

    def __init__(self, tower: TowerModel) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, dense: Tensor, *ids: KeyedJaggedTensor) -> Tensor:
        """``[B, D]`` float32 of a batch as that of `ServedRanking`."""
        vectors: Tensor = self.tower(dense, ids[0] if len(ids) == 1 else _joined(*ids))
        return vectors


def tower_source(
    model: RankingModel,
    side: TowerSide,
    columns: FeatureColumns | None = None,
    ranges: Sequence[ColumnRange] = (),
) -> Source:
    """One tower of ``model``, what its inputs are called, and a sample batch; see `ranking_source`.

    Raises:
        UserError: the model is not one for retrieval.
    """
    tower = tower_model(model, side)
    inputs, sample = _given(tower, columns, ranges)
    return ServedTower(tower), inputs, sample


def _given(
    model: Ranking | TowerModel,
    columns: FeatureColumns | None,
    ranges: Sequence[ColumnRange],
) -> tuple[ModelInputs, SampleBatch]:
    """What the inputs of a model are called, and a sample batch."""
    data_features = model.data_features()
    names_taken = {*model.dense_names, *(feature.name for feature in data_features)}
    raw = {} if columns is None else raw_columns(columns)
    inputs = ModelInputs(
        dense_features=model.dense_names,
        dense_missing="nan",
        columns={name: column for name, column in raw.items() if name in names_taken},
        ranges=_dense_ranges(model.dense_names, columns, ranges),
        other_columns={} if columns is None else _other_columns(columns, names_taken),
    )
    dense = torch.zeros(_SAMPLES, len(model.dense_names))
    plain, scored = (
        [feature.name for feature in data_features if feature.group == group]
        for group in ("id_list", "id_score_list")
    )
    ids = [
        KeyedJaggedTensor(
            names,
            torch.zeros(_SAMPLES * len(names), dtype=torch.int64),
            torch.ones(_SAMPLES * len(names)) if names is scored else None,
            lengths=torch.ones(_SAMPLES * len(names), dtype=torch.int32),
        )
        for names in (plain, scored)
        if names
    ]
    return inputs, (dense, *ids)


def _dense_ranges(
    names: Sequence[str], columns: FeatureColumns | None, ranges: Sequence[ColumnRange]
) -> dict[str, DenseRange] | None:
    if not ranges or columns is None:
        return None
    known = dict(zip(columns.dense_names, ranges, strict=True))
    return {
        name: DenseRange(least=own.least, most=own.most, missing=own.missing)
        for name, own in ((name, known[name]) for name in names)
    }


def _other_columns(columns: FeatureColumns, taken: set[str]) -> dict[str, OtherRole]:
    """What a manifest says of them; of a very wide table, not what is ignored.

    Where the model takes some of the features alone, as a tower does, the others are ignored.
    """
    roles = columns.not_features()
    places = {one.name: one.column or one.name for one in columns.dense}
    places |= {one.name: one.column or one.name for one in columns.sparse}
    read = {column for name, column in places.items() if name in taken}
    for column in sorted(set(places.values()) - read):
        roles.setdefault(column, "ignore")
    many = len(roles) > _MOST_OTHERS
    return {
        name: role
        for name, role in roles.items()
        if is_printable(name) and not (many and role == "ignore")
    }


def raw_columns(columns: FeatureColumns) -> dict[str, RawColumn]:
    """By feature, its place in a row of raw values as the data has it."""
    dense = {one.name: RawColumn(column=one.column or "") for one in columns.dense}
    sparse = {
        one.name: RawColumn(
            column=one.column or "",
            strings=one.strings,
            hex=one.hex,
            separator=one.separator or "",
            weights_column=one.weights or "",
            many=one.kind != "categorical",
            max_length=one.max_length or 0,
            keep="last" if one.kind == "sequence" else "first",
        )
        for one in columns.sparse
    }
    return dense | sparse


def labelled(batches: Iterable[Batch]) -> Iterator[LabelledBatch]:
    """Batches of training as `ServedRanking` takes them."""
    for batch in batches:
        yield (batch.dense_features, batch.sparse_features), batch.labels
