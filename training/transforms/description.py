"""`Transforms`: what is done to the raw values of a data set's columns, settled and checked."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tessera.errors import UserError
from tessera.training.modules.choices import FeatureSide
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.kinds.vocabulary import Vocabulary
from tessera.training.transforms.target_statistics import SUFFIXES, TargetStatistic
from tessera.training.transforms.transform import DenseTransform, IdTransform, Item, parse_chain


@dataclass(frozen=True, kw_only=True)
class RawDense:
    """A dense column, its transforms in order, and whose property it is."""

    name: str
    chain: tuple[DenseTransform, ...] = ()
    side: FeatureSide | None = None

    @property
    def rows(self) -> int | None:
        """Ids ``[0, rows)`` that the column becomes; None where it stays a dense value."""
        return self.chain[-1].rows if self.chain else None


@dataclass(frozen=True, kw_only=True)
class RawIds:
    """A sparse feature, the table that it shares (None: its own), its rule, and whose property it is."""

    name: str
    table: str | None = None
    rule: IdTransform | None = None
    side: FeatureSide | None = None

    @property
    def vocabulary(self) -> str | None:
        """The name of its vocabulary, if it has one; features of one table share it."""
        return (self.table or self.name) if isinstance(self.rule, Vocabulary) else None


@dataclass(frozen=True, kw_only=True)
class Transforms:
    """Everything between a batch's raw values and what a model's tables and layers get.

    Attributes:
        dense: the data's dense columns, in order.
        sparse: the data's sparse features, in order.
        labels: the data's labels, in order.
        crosses: further features of the model, by name.
        target_statistics: further dense values of the model, by name.

    Raises:
        UserError: a name that is unknown or given twice, or settings that contradict each other.
    """

    dense: tuple[RawDense, ...] = ()
    sparse: tuple[RawIds, ...] = ()
    labels: tuple[str, ...] = ()
    crosses: Mapping[str, Cross] = field(default_factory=dict)
    target_statistics: Mapping[str, TargetStatistic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_dense()
        self._check_vocabularies()
        sparse = [column.name for column in self.sparse]
        for name, cross in self.crosses.items():
            for column in cross.of:
                _known(f"crosses.{name}.of", column, sparse, "column of ids")
        for name, statistic in self.target_statistics.items():
            for column in statistic.key:
                _known(f"target_statistics.{name}.key", column, sparse, "column of ids")
            if statistic.label is not None:
                label = f"target_statistics.{name}.label"
                _known(label, statistic.label, self.labels, "label")
        for names in (self.dense_names, self.sparse_names):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise UserError(f"the name {twice!r} stands for two features; rename one")

    def _check_dense(self) -> None:
        names = [column.name for column in self.dense]
        for column in self.dense:
            for place, step in enumerate(column.chain):
                where = f"columns.{column.name}.transform[{place}].{step.name}"
                for other in step.reads:
                    _known(where, other, names, "dense column")
                if step.rows is not None and step is not column.chain[-1]:
                    raise UserError(f"{where}: it makes ids of the column; put it last")

    def _check_vocabularies(self) -> None:
        first: dict[str, RawIds] = {}
        for column in self.sparse:
            if column.table is None:
                continue
            other = first.setdefault(column.table, column)
            rules = (other.rule, column.rule)
            if any(isinstance(rule, Vocabulary) for rule in rules) and rules[0] != rules[1]:
                raise UserError(
                    f"columns.{column.name}.transform: {other.name} and {column.name} share table"
                    f" {column.table!r}, so they share its vocabulary; give both the same transform"
                )

    @property
    def dense_names(self) -> list[str]:
        """Names of the dense values that the model gets, in order."""
        statistics = [f"{name}_{what}" for name in self.target_statistics for what in SUFFIXES]
        return [column.name for column in self.dense if column.rows is None] + statistics

    @property
    def sparse_names(self) -> list[str]:
        """Names of the features that the model gets, in order."""
        buckets = [column.name for column in self.dense if column.rows is not None]
        return [column.name for column in self.sparse] + list(self.crosses) + buckets

    @property
    def sides(self) -> dict[str, tuple[FeatureSide | None, ...]]:
        """By dense value and feature that the model gets: the sides of the columns it is made of.

        Those of target statistics are empty, as they are made of labels.
        """
        dense = {column.name: column for column in self.dense}
        sparse = {column.name: column.side for column in self.sparse}
        made: dict[str, tuple[FeatureSide | None, ...]] = {
            name: (column.side, *(dense[o].side for step in column.chain for o in step.reads))
            for name, column in dense.items()
        }
        made |= {name: (side,) for name, side in sparse.items()}
        made |= {n: tuple(sparse[one] for one in cross.of) for n, cross in self.crosses.items()}
        return made | {f"{n}_{what}": () for n in self.target_statistics for what in SUFFIXES}

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """The settings of each vocabulary, by its name."""
        return {
            column.vocabulary: column.rule
            for column in self.sparse
            if column.vocabulary is not None and isinstance(column.rule, Vocabulary)
        }

    @property
    def bucket_features(self) -> dict[str, int]:
        """Rows of each feature that is made of a dense column."""
        return {column.name: column.rows for column in self.dense if column.rows is not None}


def plain_transforms(
    dense: Iterable[str], sparse: Iterable[str], labels: Iterable[str] = ()
) -> Transforms:
    """Columns of these names without any transform."""
    return Transforms(
        dense=tuple(RawDense(name=name) for name in dense),
        sparse=tuple(RawIds(name=name) for name in sparse),
        labels=tuple(labels),
    )


def dense_column(name: str, items: Iterable[Item], *, side: FeatureSide | None = None) -> RawDense:
    """A dense column with the transforms of these YAML items.

    Raises:
        UserError: an item is wrong; names the field, the value and the remedy.
    """
    field_name = f"columns.{name}.transform"
    chain = parse_chain(field_name, "dense", tuple(items))
    steps = tuple(step for step in chain if isinstance(step, DenseTransform))
    return RawDense(name=name, chain=steps, side=side)


def id_column(
    name: str,
    items: Iterable[Item],
    *,
    table: str | None = None,
    side: FeatureSide | None = None,
) -> RawIds:
    """A sparse feature with the rule of these YAML items, at most one.

    Raises:
        UserError: an item is wrong; names the field, the value and the remedy.
    """
    field_name, given = f"columns.{name}.transform", tuple(items)
    chain = parse_chain(field_name, "ids", given)
    if len(chain) > 1:
        raise UserError(f"{field_name}={list(given)!r}: ids have one rule; give one of these")
    rules = [step for step in chain if isinstance(step, IdTransform)]
    return RawIds(name=name, table=table, rule=rules[0] if rules else None, side=side)


def _known(field_name: str, name: str, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name in names:
        return
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(names) or "none"
    raise UserError(f"{field_name}={name!r}: the data has no such {what}; it has {listed}{hint}")
