"""What each column of a config gives a batch, settled against the types in the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tessera.errors import UserError
from tessera.training.data.columns import (
    LIST_KINDS,
    SPARSE_KINDS,
    ColumnConfig,
    DenseColumn,
    FeatureColumns,
    LabelColumn,
    SparseColumn,
    SparseKind,
)
from tessera.training.data.remote import Location
from tessera.training.data.string_columns import is_string_type
from tessera.training.data.table.common import missing_column
from tessera.training.data.table.text import Holds, TextColumn

_HOLDS: dict[str, Holds] = {
    "dense": "number",
    "label": "number",
    "weight": "number",
    "timestamp": "time",
}


@dataclass(frozen=True, kw_only=True)
class SparseSource:
    """Where a sparse feature comes from.

    Attributes:
        name: its key in a batch.
        column: its column in the files.
        many: whether a row has a list of ids.
        weights: the column of the ids' weights, if that is another one.
        weighted: whether ids have weights.
        max_length: ids that are kept of a list; None: all.
        keep_last: whether the last ids are kept, or the first.
        strings: whether ids are strings.
        separator: what separates the ids of a list that is a string; None: ``|``.
    """

    name: str
    column: str
    many: bool
    weights: str | None
    weighted: bool
    max_length: int | None
    keep_last: bool
    strings: bool
    separator: str | None


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """The columns of a table, by what they are used for; the names are those in the files.

    Attributes:
        dense: in the order of a batch's dense columns.
        sparse: in the order of a batch's keys: features of one id each, then lists.
        labels: in the order of a batch's labels, each with whether it is binary; of a table without
            labels none, and then every row is a positive one.
        weight: the column of the samples' weights.
        split: the column that splits by time or hash look at.
        columns: the description that the dataset carries.
    """

    dense: tuple[str, ...]
    sparse: tuple[SparseSource, ...]
    labels: tuple[tuple[str, bool], ...]
    weight: str | None
    split: str | None
    columns: FeatureColumns

    def feature_names(self) -> list[str]:
        """The columns that batches are made of, besides labels and weights."""
        names = [*self.dense, *(source.column for source in self.sparse)]
        names += [source.weights for source in self.sparse if source.weights is not None]
        return list(dict.fromkeys(names))

    def with_separators(self, text: list[TextColumn]) -> TableColumns:
        """The same, with what stands between the items of lists in the text files of the table."""
        signs = {column.name: column.separator for column in text if column.many}
        sparse = tuple(
            replace(one, separator=signs.get(one.column or one.name) or one.separator)
            for one in self.columns.sparse
        )
        return replace(self, columns=replace(self.columns, sparse=sparse))

    def row_names(self) -> list[str]:
        """The columns that are read once, before training."""
        names = [name for name, _ in self.labels]
        names += [name for name in (self.weight, self.split) if name is not None]
        return list(dict.fromkeys(names))


def text_columns(
    columns: Mapping[str, ColumnConfig],
    split_column: str | None,
    partitions: Mapping[str, Any],
    *,
    by_time: bool = False,
) -> list[TextColumn]:
    """How the columns are read from files of text, those that folders name left out.

    ``by_time``: the split looks at the order of ``split_column``.
    """
    found: dict[str, TextColumn] = {}
    for name, own in columns.items():
        source = own.column or name
        if own.kind == "ignore" or source in partitions:
            continue
        column = TextColumn(
            name=source,
            holds=_HOLDS.get(own.kind, "id"),
            many=own.kind in LIST_KINDS,
            weighted=own.kind == "weighted_list" and own.weights is None,
            strings=own.strings,
            separator=own.separator,
        )
        if source not in found or own.kind in SPARSE_KINDS:
            found[source] = column
        if own.weights is not None:
            found[own.weights] = TextColumn(name=own.weights, holds="number", many=True)
    if split_column is not None and split_column not in {*found, *partitions}:
        found[split_column] = TextColumn(name=split_column, holds="time" if by_time else "id")
    return list(found.values())


def settle(
    columns: Mapping[str, ColumnConfig], split_column: str | None, schema: Any, path: Location
) -> TableColumns:
    """Check the config's columns against ``schema``, the Arrow schema of the file ``path``.

    Raises:
        UserError: the file lacks a column, or one has a type that its kind cannot be read from.
    """
    dense, dense_columns, labels = [], [], []
    single: list[tuple[SparseSource, SparseColumn]] = []
    lists: list[tuple[SparseSource, SparseColumn]] = []
    others: dict[str, str] = {}
    ignored = []
    for name, own in columns.items():
        if own.kind == "ignore":
            ignored.append(own.column or name)
            continue
        source = own.column or name
        kind = _type(schema, source, path)
        _check(source, own, kind, path)
        if own.kind == "dense":
            dense.append(source)
            dense_columns.append(
                DenseColumn(name=name, column=own.column, side=own.side, transform=own.transform)
            )
        elif own.kind == "label":
            task = own.task or "binary"
            labels.append((source, LabelColumn(name=name, task=task, column=own.column)))
        elif own.kind in SPARSE_KINDS:
            if own.weights is not None:
                _check(own.weights, own, _type(schema, own.weights, path), path, weights=True)
            many = own.kind in LIST_KINDS
            (lists if many else single).append(_sparse(name, source, own, kind))
        else:
            others[own.kind] = source
    if split_column is not None:
        _type(schema, split_column, path)
    sparse = single + lists
    return TableColumns(
        dense=tuple(dense),
        sparse=tuple(source for source, _ in sparse),
        labels=tuple((source, label.task == "binary") for source, label in labels),
        weight=others.get("weight"),
        split=split_column,
        columns=FeatureColumns(
            dense=tuple(dense_columns),
            sparse=tuple(column for _, column in sparse),
            labels=tuple(label for _, label in labels) or (LabelColumn(name="label"),),
            weight=others.get("weight"),
            timestamp=others.get("timestamp"),
            group=others.get("group"),
            ignored=tuple(ignored),
        ),
    )


def _sparse(
    name: str, source: str, own: ColumnConfig, kind: Any
) -> tuple[SparseSource, SparseColumn]:
    ids = _ids_type(kind)
    sparse_kind: SparseKind = own.kind  # type: ignore[assignment] # it is one of them
    strings = is_string_type(ids) and not (own.strings is False and own.kind in LIST_KINDS)
    read = SparseSource(
        name=name,
        column=source,
        many=own.kind in LIST_KINDS,
        weights=own.weights,
        weighted=own.kind == "weighted_list",
        max_length=own.max_length,
        keep_last=own.kind == "sequence",
        strings=strings,
        separator=own.separator,
    )
    column = SparseColumn(
        name=name,
        column=own.column,
        kind=sparse_kind,
        side=own.side,
        table=own.table,
        transform=own.transform,
        max_length=own.max_length,
        weights=own.weights,
        strings=strings,
        separator=(own.separator or "|") if read.many and is_string_type(kind) else None,
    )
    return read, column


def _type(schema: Any, name: str, path: Location) -> Any:
    indices = schema.get_all_field_indices(name)
    if not indices:
        raise missing_column(path, name, schema.names)
    if len(indices) > 1:
        raise UserError(f"{path}: has {len(indices)} columns {name!r}; give each its own name")
    return schema.field(indices[0]).type


def _ids_type(kind: Any) -> Any:
    """The type of one id of a column."""
    if pa.types.is_map(kind):
        return kind.key_type
    if is_list(kind):
        return kind.value_type
    return kind


def is_list(kind: Any) -> bool:
    """Whether the values of an Arrow type are lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def _plain(kind: Any) -> Any:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_number(kind: Any) -> bool:
    kind = _plain(kind)
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in (*tests, pa.types.is_null))


def _is_id(kind: Any) -> bool:
    plain = _plain(kind)
    tests = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_temporal, pa.types.is_floating)
    return is_string_type(kind) or any(test(plain) for test in (*tests, pa.types.is_null))


def _check(
    source: str, own: ColumnConfig, kind: Any, path: Location, *, weights: bool = False
) -> None:
    """Refuse a type that the column's kind cannot be read from."""
    if weights:
        fits = is_list(kind) and _is_number(kind.value_type)
    elif own.kind in {"dense", "label", "weight"}:
        fits = _is_number(kind)
    elif own.kind == "weighted_list" and own.weights is None:
        fits = pa.types.is_map(kind) and _is_id(kind.key_type) and _is_number(kind.item_type)
    elif own.kind in LIST_KINDS:
        fits = (is_list(kind) and _is_id(kind.value_type)) or is_string_type(kind)
    elif own.kind == "timestamp":
        fits = pa.types.is_temporal(kind) or _is_number(kind)
    else:
        fits = _is_id(kind)
    if not fits:
        what = "the weights of a weighted_list" if weights else f"kind {own.kind}"
        raise UserError(
            f"{path}: column {source!r} has the type {str(kind)[:100]}, which {what} cannot be read"
            " from; change the file, or the kind in data.columns"
        )
