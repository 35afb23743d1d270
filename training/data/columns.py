"""What the columns of a data set are: as a config says it, and as a `Dataset` has settled it.

`ColumnConfig` is one entry of ``data.columns``.  `FeatureColumns` is what every dataset carries and
every checkpoint stores: which dense values, ids and labels a batch holds, in which order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.config_source import ConfigSource
from tessera.training.modules.choices import FeatureSide
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.description import Transforms, dense_column, id_column
from tessera.training.transforms.target_statistics import TargetStatistic
from tessera.training.transforms.transform import parse_chain
from tessera.training.typed_config import build, to_plain

Kind = Literal[
    "dense",
    "categorical",
    "categorical_list",
    "sequence",
    "weighted_list",
    "label",
    "weight",
    "timestamp",
    "group",
    "ignore",
]
SparseKind = Literal["categorical", "categorical_list", "sequence", "weighted_list"]
Side = FeatureSide
Task = Literal["binary", "regression"]
OtherRole = Literal["label", "weight", "timestamp", "group", "ignore"]
ServedTask = Literal["binary", "regression", "score"]
"""What an output of a package is: a probability, a value, or a score that only ranks."""

LIST_KINDS = ("categorical_list", "sequence", "weighted_list")
SPARSE_KINDS = ("categorical", *LIST_KINDS)
FEATURE_KINDS = ("dense", *SPARSE_KINDS)

_KINDS_WITH: Mapping[str, tuple[str, ...]] = {
    "side": FEATURE_KINDS,
    "table": SPARSE_KINDS,
    "transform": FEATURE_KINDS,
    "max_length": LIST_KINDS,
    "weights": ("weighted_list",),
    "task": ("label",),
    "strings": (*SPARSE_KINDS, "group"),
    "separator": LIST_KINDS,
}
"""The kinds of column that a field of `ColumnConfig` is for; ``column`` is for all."""


@dataclass(frozen=True, kw_only=True)
class ColumnConfig:
    """One column of a table, or one use of it.

    Attributes:
        kind: what the column is.  ``dense``: a number.  ``categorical``: one id.
            ``categorical_list``: ids without an order.  ``sequence``: ids in the order of time,
            the latest last.  ``weighted_list``: ids with a weight each, a column of maps, or of
            lists beside which ``weights`` names another column of lists.  ``label``: what is to be
            predicted.  ``weight``: what the row counts in the loss.  ``timestamp``: when the row came
            to be.  ``group``: rows with the same value belong together, as those of one user.
            ``ignore``: not read.
        side: whose property a feature is; None: not known.
        column: the column's name in the files; None: the name under which this entry stands.
        table: features that give the same name share an embedding table; None: a table alone.
        transform: steps from the raw value to what the model is given, each a name or a mapping
            of one name to its settings.
        max_length (ids): lists are cut to this many ids: sequences keep the last ones, others the first.
        weights: the column with the weights of a ``weighted_list`` of lists.
        task: what a label is; None: ``binary``.
        strings: of text files, whether ids are strings, even if they look like numbers; None: they
            are where the first rows hold anything but plain integers.
        separator: what stands between the items of a list that is a text; None: the first of
            ``|``, ``;``, space and ``,`` that stands in the first rows.
    """

    kind: Kind
    side: Side | None = None
    column: str | None = None
    table: str | None = None
    transform: tuple[Any, ...] = ()
    max_length: int | None = None
    weights: str | None = None
    task: Task | None = None
    strings: bool | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        check.one_of(self, "kind", Kind)
        check.one_of(self, "side", Side)
        check.one_of(self, "task", Task)
        check.at_least_one(self, "max_length")
        for name, kinds in _KINDS_WITH.items():
            value = getattr(self, name)
            if value not in (None, ()) and self.kind not in kinds:
                raise UserError(
                    f"{name}={value!r}: a column of kind {self.kind} has none; leave it out, or give"
                    f" kind {' or '.join(kinds)}"
                )
        for name in ("column", "table", "weights", "separator"):
            if getattr(self, name) == "":
                raise UserError(f"{name}='': give a name, or leave it out")
        if self.separator is not None and not self.separator.isprintable():
            raise UserError(f"separator={self.separator!r}: give signs that can be printed")
        if self.table is not None and "." in self.table:
            raise UserError(f"table={self.table!r}: give a name without a dot")
        for item in self.transform:
            if not isinstance(item, str) and not (isinstance(item, Mapping) and len(item) == 1):
                raise UserError(
                    f"transform={item!r}: give a name, or a mapping of one name to its settings"
                )
        parse_chain("transform", "dense" if self.kind == "dense" else "ids", self.transform)


@dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """One column of `Batch.dense_features`; the fields are those of `ColumnConfig`."""

    name: str
    column: str | None = None
    side: Side | None = None
    transform: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One key of `Batch.sparse_features`; the fields are those of `ColumnConfig`.

    Attributes:
        strings: whether the ids are hashes of strings; otherwise they are integers of the data.
        hex: whether the data writes these integers in hexadecimal digits.
        separator: what stands between the ids of a list that is a text in the data; None: lists
            are not texts.
    """

    name: str
    column: str | None = None
    kind: SparseKind = "categorical"
    side: Side | None = None
    table: str | None = None
    transform: tuple[Any, ...] = ()
    max_length: int | None = None
    weights: str | None = None
    strings: bool = False
    hex: bool = False
    separator: str | None = None


@dataclass(frozen=True, kw_only=True)
class LabelColumn:
    """One label of `Batch.labels`; ``column`` is its name in the data, None: ``name``."""

    name: str
    task: Task = "binary"
    column: str | None = None


@dataclass(frozen=True, kw_only=True)
class FeatureColumns:
    """What the batches of a dataset hold.

    Attributes:
        dense: the dense features, in column order.
        sparse: the sparse features, in the order of a batch's keys.
        labels: the labels, in column order; at least one.
        weight: the column of the samples' weights; None: `Batch.weights` is None.
        timestamp: the column that says when a row came to be, if one does.
        group: the column whose equal values belong together, if there is one.
        ignored: columns of the data that the config knows and nothing reads.
        user_id: the sparse feature of one id that says whose a row is, if one is declared.
        item_id: the sparse feature of one id that says which item a row is about, if one is declared.
        crosses: features of the model that join several of these, by name.
        target_statistics: dense values of the model that say what a label was on average, by name.

    Raises:
        UserError: a transform, a cross or a statistic that is wrong or does not fit the columns, or a
            ``user_id`` or ``item_id`` that is not a feature of one id.
    """

    dense: tuple[DenseColumn, ...] = ()
    sparse: tuple[SparseColumn, ...] = ()
    labels: tuple[LabelColumn, ...]
    weight: str | None = None
    timestamp: str | None = None
    group: str | None = None
    ignored: tuple[str, ...] = ()
    user_id: str | None = None
    item_id: str | None = None
    crosses: dict[str, Cross] = field(default_factory=dict)
    target_statistics: dict[str, TargetStatistic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.transforms()
        single = [column.name for column in self.sparse if column.kind == "categorical"]
        for name, value in (("user_id", self.user_id), ("item_id", self.item_id)):
            if value is not None and value not in single:
                raise UserError(
                    f"{name}={value!r}: the data has no such column of kind categorical; it has"
                    f" {', '.join(single) or 'none'}"
                )

    def transforms(self) -> Transforms:
        """What the model does to the batches' raw values, settled and checked."""
        return Transforms(
            dense=tuple(
                dense_column(column.name, column.transform, side=column.side)
                for column in self.dense
            ),
            sparse=tuple(
                id_column(column.name, column.transform, table=column.table, side=column.side)
                for column in self.sparse
            ),
            labels=self.label_names,
            crosses=self.crosses,
            target_statistics=self.target_statistics,
        )

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense features, in column order."""
        return tuple(column.name for column in self.dense)

    @cached_property
    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in the order of a batch's keys."""
        return tuple(column.name for column in self.sparse)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, in column order."""
        return tuple(column.name for column in self.labels)

    def not_features(self) -> dict[str, OtherRole]:
        """The columns of the data that no feature reads, by their names there, with what they are."""
        named: list[tuple[str | None, OtherRole]] = [
            *((name, "ignore") for name in self.ignored),
            (self.group, "group"),
            (self.timestamp, "timestamp"),
            (self.weight, "weight"),
            *((label.column or label.name, "label") for label in self.labels),
        ]
        read = {one.column or one.name for one in self.dense}
        read |= {one.column or one.name for one in self.sparse}
        read |= {one.weights for one in self.sparse if one.weights is not None}
        return {name: role for name, role in named if name is not None and name not in read}

    def to_json(self) -> dict[str, Any]:
        """Dicts, lists and scalars; `from_json` is the inverse."""
        return dict(to_plain(self))

    @classmethod
    def from_json(cls, values: dict[str, Any], *, name: str) -> FeatureColumns:
        """Read what `to_json` gave; ``name`` stands for its place in error messages.

        Raises:
            ConfigError: a key or value is not (or no longer) valid.
        """
        return build(cls, ConfigSource(values=values, origins={(): name}))
