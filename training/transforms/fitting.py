"""Fitting: what transforms learn from the training rows, in as few passes as their order allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

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
    preprocessor = Preprocessor(transforms)
    passes, unfitted = 0, _unfitted(preprocessor)
    while unfitted:
        ready = _ready(preprocessor, unfitted)
        unfitted = [place for place in unfitted if place not in ready]
        passes += 1
    looks = transforms.dense or transforms.vocabularies or transforms.target_statistics
    return max(passes, 1 if looks else 0)


@dataclass(kw_only=True)
class Sums:
    """What some rows told a pass; everything in it can be merged with that of other rows.

    Attributes:
        dense: by the place of a stage in the preprocessor, what it learns from.
        counts: of the ids of each vocabulary; empty after the first pass.
        targets: of the target statistics; None after the first pass, and where there are none.
        ranges: of the dense columns; without rows after the first pass.
    """

    dense: dict[int, DenseAccumulator]
    counts: dict[str, IdCounts]
    targets: TargetSums | None
    ranges: RangeAccumulator

    def merge(self, later: Sums) -> None:
        """Take those of the rows that stand behind these."""
        for place, own in self.dense.items():
            own.merge(later.dense[place])
        for name, counts in self.counts.items():
            counts.merge(later.counts[name])
        if self.targets is not None and later.targets is not None:
            self.targets.merge(later.targets)
        self.ranges.merge(later.ranges)

    def settle(self) -> None:
        """Hold each id and key once, for a way to another process."""
        for counts in self.counts.values():
            counts.settle()
        if self.targets is not None:
            self.targets.settle()


class FittingPass:
    """One pass over the training rows, any part of which can be summed by itself.

    Args:
        preprocessor: with what the passes before have learned.
        ready: the places of its stages that this pass fits.
        first: whether this is the first pass, which also looks at ids and labels.
    """

    def __init__(self, preprocessor: Preprocessor, ready: Sequence[int], *, first: bool) -> None:
        self._preprocessor = preprocessor
        self._ready = tuple(ready)
        self._first = first

    @property
    def looks_at_ids(self) -> bool:
        """Whether it looks at sparse features; the others can do without them in its batches."""
        transforms = self._preprocessor.transforms
        return self._first and bool(transforms.vocabularies or transforms.target_statistics)

    def sums(self, batches: Iterable[FittedRows]) -> Sums:
        """What these rows tell.  The same rows in the same batches give the same bits."""
        preprocessor, transforms = self._preprocessor, self._preprocessor.transforms
        found = Sums(
            dense={place: _accumulator(preprocessor.stages[place]) for place in self._ready},
            counts={n: IdCounts() for n in transforms.vocabularies if self._first},
            targets=_target_sums(transforms) if self._first else None,
            ranges=RangeAccumulator(len(transforms.dense)),
        )
        for batch in batches:
            rows = batch.row_numbers
            if rows is None:
                raise ValueError("the batch has no row_numbers; fitting needs them")
            self._update_dense(found.dense, batch.dense_features, rows)
            if self._first:
                found.ranges.update(batch.dense_features)
                _count_ids(transforms, found.counts, batch.sparse_features)
            if found.targets is not None and preprocessor.first_ids is not None:
                in_order = preprocessor.in_order(batch.sparse_features)
                keys, has = preprocessor.first_ids(in_order)
                own = preprocessor.statistic_keys
                found.targets.update(keys[own], has[own], batch.labels, rows)
        return found

    def _update_dense(
        self, ready: dict[int, DenseAccumulator], dense: Tensor, rows: Tensor
    ) -> None:
        if not ready:
            return
        values = dense
        for place, stage in enumerate(self._preprocessor.stages):
            if place in ready:
                ready[place].update(values, rows)
            values = stage(values, dense)


def fit(transforms: Transforms, epoch: Callable[[], Iterable[FittedRows]]) -> Fitted:
    """Learn the transforms' values from rows that are read one batch after the other.

    Memory is bounded: see the accumulators of the kinds.

    Args:
        transforms: what is to be fitted.
        epoch: the training rows, from the first one each time that it is called.
    """
    return fit_in_parts(transforms, lambda one: [one.sums(epoch())])


def fit_in_parts(transforms: Transforms, parts: Callable[[FittingPass], Iterable[Sums]]) -> Fitted:
    """Learn the transforms' values from the sums of parts of the rows, merged in their order.

    Args:
        transforms: what is to be fitted.
        parts: the sums of all parts of the training rows; called once for each pass.
    """
    preprocessor = Preprocessor(transforms)
    unfitted = _unfitted(preprocessor)
    counts: dict[str, IdCounts] = {}
    targets: TargetSums | None = None
    ranges = RangeAccumulator(len(transforms.dense))
    for number in range(fitting_passes(transforms)):
        ready = _ready(preprocessor, unfitted)
        one = FittingPass(preprocessor, ready, first=number == 0)
        found: Sums | None = None
        for part in parts(one):
            if found is None:
                found = part
            else:
                found.merge(part)
        found = found or one.sums([])
        for place in ready:
            preprocessor.stages[place].load_state_dict(found.dense[place].state())
        if number == 0:
            counts, targets, ranges = found.counts, found.targets, found.ranges
        unfitted = [place for place in unfitted if place not in ready]
    return replace(_joined(transforms, preprocessor, counts, targets), ranges=ranges.ranges())


def _accumulator(stage: nn.Module) -> DenseAccumulator:
    found = stage.accumulator() if isinstance(stage, DenseStage) else None
    assert found is not None, stage
    return found


def _unfitted(preprocessor: Preprocessor) -> list[int]:
    """The places of the stages that learn something."""
    return [
        place
        for place, stage in enumerate(preprocessor.stages)
        if isinstance(stage, DenseStage) and stage.accumulator() is not None
    ]


def _ready(preprocessor: Preprocessor, unfitted: list[int]) -> list[int]:
    """The stages that no other unfitted stage stands before, in any of their columns."""
    blocked: set[int] = set()
    ready = []
    for place in unfitted:
        stage = preprocessor.stages[place]
        assert isinstance(stage, DenseStage)
        columns = {column for column, own in enumerate(stage.settings) if own is not None}
        if not columns & blocked:
            ready.append(place)
        blocked |= columns
    return ready


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
