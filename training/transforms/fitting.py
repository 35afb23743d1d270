"""Fitting: what transforms learn from the training rows, in as few passes as their order allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.transforms.description import Transforms
from tessera.training.transforms.kinds.vocabulary import IdCounts, VocabularyLookup
from tessera.training.transforms.preprocessor import FittedSizes, Preprocessor
from tessera.training.transforms.ranges import ColumnRange, RangeAccumulator
from tessera.training.transforms.target_statistics import TargetSums
from tessera.training.transforms.transform import DenseAccumulator, DenseStage


class FittedRows(Protocol):
    """A batch of training rows, as far as transforms look at it."""

    @property
    def dense_features(self) -> Tensor:
        """``[B, F_dense]`` float32."""

    @property
    def sparse_features(self) -> KeyedJaggedTensor:
        """Raw int64 ids."""

    @property
    def labels(self) -> Tensor:
        """``[B]`` or ``[B, L]`` float32."""

    @property
    def row_numbers(self) -> Tensor | None:
        """``[B]`` int64: the rows' numbers in the data set."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What was learned.

    Attributes:
        sizes: what a `Preprocessor` is built with.
        state: its state dict.
        ranges: of each dense column; empty where there are no rows.
    """

    sizes: FittedSizes
    state: dict[str, Tensor]
    ranges: tuple[ColumnRange, ...] = ()


def fitting_passes(transforms: Transforms) -> int:
    """How often `fit` goes through the training rows; 0 where there is nothing to be seen in them."""
    passes, unfitted = 0, _unfitted(Preprocessor(transforms))
    while unfitted:
        ready = _ready(unfitted)
        unfitted = [stage for stage in unfitted if stage not in ready]
        passes += 1
    looks = transforms.dense or transforms.vocabularies or transforms.target_statistics
    return max(passes, 1 if looks else 0)


def fit(transforms: Transforms, epoch: Callable[[], Iterable[FittedRows]]) -> Fitted:
    """Learn the transforms' values, and between which values the dense columns lie.

    Memory is bounded: see the accumulators of the kinds.  The same rows in the same batches give
    the same bits.

    Args:
        transforms: what is to be fitted.
        epoch: the training rows, from the first one each time that it is called.
    """
    preprocessor = Preprocessor(transforms)
    counts = {name: IdCounts() for name in transforms.vocabularies}
    sums = _target_sums(transforms)
    ranges = RangeAccumulator(len(transforms.dense))
    unfitted = _unfitted(preprocessor)
    for number in range(fitting_passes(transforms)):
        ready = _ready(unfitted)
        for batch in epoch():
            rows = batch.row_numbers
            if rows is None:
                raise ValueError("the batch has no row_numbers; fitting needs them")
            _update_dense(preprocessor, ready, batch.dense_features, rows)
            if number == 0:
                ranges.update(batch.dense_features)
                _count_ids(transforms, counts, batch.sparse_features)
                if sums is not None and preprocessor.first_ids is not None:
                    in_order = preprocessor.in_order(batch.sparse_features)
                    keys, has = preprocessor.first_ids(in_order)
                    own = preprocessor.statistic_keys
                    sums.update(keys[own], has[own], batch.labels, rows)
        for stage, accumulator in ready.items():
            stage.load_state_dict(accumulator.state())
        unfitted = [stage for stage in unfitted if stage not in ready]
    return replace(_joined(transforms, preprocessor, counts, sums), ranges=ranges.ranges())


def _unfitted(preprocessor: Preprocessor) -> list[DenseStage]:
    stages = [stage for stage in preprocessor.stages if isinstance(stage, DenseStage)]
    return [stage for stage in stages if stage.accumulator() is not None]


def _ready(unfitted: list[DenseStage]) -> dict[DenseStage, DenseAccumulator]:
    """The stages that no other unfitted stage stands before, in any of their columns."""
    blocked: set[int] = set()
    ready: dict[DenseStage, DenseAccumulator] = {}
    for stage in unfitted:
        columns = {place for place, own in enumerate(stage.settings) if own is not None}
        accumulator = stage.accumulator()
        assert accumulator is not None
        if not columns & blocked:
            ready[stage] = accumulator
        blocked |= columns
    return ready


def _update_dense(
    preprocessor: Preprocessor,
    ready: dict[DenseStage, DenseAccumulator],
    dense: Tensor,
    rows: Tensor,
) -> None:
    if not ready:
        return
    values = dense
    for stage in preprocessor.stages:
        if stage in ready:
            ready[stage].update(values, rows)
        values = stage(values, dense)


def _count_ids(
    transforms: Transforms, counts: dict[str, IdCounts], features: KeyedJaggedTensor
) -> None:
    if not counts:
        return
    bags = features.to_dict()
    for column in transforms.sparse:
        if column.vocabulary is not None:
            counts[column.vocabulary].update(bags[column.name].values().long())


def _target_sums(transforms: Transforms) -> TargetSums | None:
    settings = list(transforms.target_statistics.values())
    if not settings:
        return None
    labels = [0 if one.label is None else transforms.labels.index(one.label) for one in settings]
    return TargetSums(settings, labels)


def _joined(
    transforms: Transforms,
    preprocessor: Preprocessor,
    counts: dict[str, IdCounts],
    sums: TargetSums | None,
) -> Fitted:
    settings = transforms.vocabularies
    kept = {name: own.kept(settings[name]) for name, own in counts.items()}
    state = dict(preprocessor.state_dict())
    if kept:
        for name, value in VocabularyLookup.state(list(kept.values())).items():
            state[f"vocabulary.{name}"] = value
    keys = 0
    if sums is not None:
        statistics = sums.state()
        keys = len(statistics.get("keys_U", torch.empty(0)))
        state |= {f"statistics.{name}": value for name, value in statistics.items()}
    sizes = FittedSizes(vocabularies={name: len(ids) for name, ids in kept.items()}, keys=keys)
    return Fitted(sizes=sizes, state=state)
