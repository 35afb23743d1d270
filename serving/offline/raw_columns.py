"""Arrow tables of raw rows to a package's inputs, a column at a time.

What the package's schema says of its columns becomes the description by which training reads tables
(`tessera.training.data.table`), so that both make the same numbers and ids of a cell.  Cells that a
model cannot take are found here, by row; `tessera.serving.client.rows` has the last word on such rows.

Shapes: ``n`` rows, ``F`` features of a group, ``N`` ids.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from tessera.errors import UserError
from tessera.serving.package.runner import HostBatch
from tessera.serving.package.schema import FeatureSpec, Group, InputSchema
from tessera.training.data.columns import ColumnConfig, Kind
from tessera.training.data.remote import Location
from tessera.training.data.string_columns import is_string_type
from tessera.training.data.table.decode import (
    Mask,
    ids_of,
    jagged_of,
    numbers_of,
    read_column,
    whole_array,
)
from tessera.training.data.table.settle import SparseSource, is_list, settle, text_columns
from tessera.training.data.table.text import TextColumn

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_EXACT = 2**53
"""Whole numbers up to this are the same as floats."""

Jagged = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32] | None]


def dense_columns(schema: InputSchema) -> dict[str, str]:
    """By dense feature, in order, the column of a row that holds it."""
    columns = schema.dense_columns or ("",) * len(schema.dense_features)
    return {n: column or n for n, column in zip(schema.dense_features, columns, strict=True)}


def column_names(schema: InputSchema) -> list[str]:
    """The columns of a row that the model takes, each once."""
    names = [*dense_columns(schema).values(), *(_column(feature) for feature in schema.features)]
    names += [feature.weights_column for feature in schema.features if feature.weights_column]
    return list(dict.fromkeys(names))


def text_columns_of(schema: InputSchema, partitions: Mapping[str, Any]) -> list[TextColumn]:
    """How the model's columns are read from files of text, those that folders name left out."""
    return text_columns(_configs(schema, None), None, partitions)


def _column(feature: FeatureSpec) -> str:
    return feature.column or feature.name


def _configs(schema: InputSchema, types: Mapping[str, Any] | None) -> dict[str, ColumnConfig]:
    """What training's readers are told of the columns; ``types`` are those of a file."""
    found = {n: ColumnConfig(kind="dense", column=c) for n, c in dense_columns(schema).items()}
    for feature in schema.features:
        kind = _kind(feature, None if types is None else types.get(_column(feature)))
        found[feature.name] = ColumnConfig(
            kind=kind,
            column=_column(feature),
            weights=(feature.weights_column or None) if kind == "weighted_list" else None,
            max_length=(feature.max_length or None) if kind != "categorical" else None,
            strings=feature.strings,
        )
    return found


def _kind(feature: FeatureSpec, kind: Any) -> Kind:
    """One id where a cell has one, whatever the schema allows beyond that; otherwise a list."""
    if feature.group == "id_score_list":
        return "weighted_list"
    listed = feature.many
    if kind is not None and not pa.types.is_null(kind):
        scalar = not is_list(kind) and not (feature.many and is_string_type(kind))
        listed = not scalar
    if not listed:
        return "categorical"
    return "sequence" if feature.keep == "last" else "categorical_list"


class RawColumns:
    """How the columns of a file give a model's inputs.

    Args:
        schema: the model's inputs.
        types: the Arrow schema of the file's columns.
        path: the file, for messages.
        separators: by column, what stands between the items of a list that is a text.

    Raises:
        UserError: the file lacks a column, or one has a type that the feature cannot be read from.
    """

    def __init__(
        self,
        schema: InputSchema,
        types: Any,
        path: Location,
        separators: Mapping[str, str] | None = None,
    ) -> None:
        given = {field.name: field.type for field in types}
        settled = settle(_configs(schema, given), None, types, path)
        sources = {source.name: source for source in settled.sparse}
        separators = separators or {}
        self._schema = schema
        self._dense = list(settled.dense)
        self._sources: list[tuple[FeatureSpec, SparseSource]] = []
        for feature in schema.features:
            source = sources[feature.name]
            kind = given[source.column]
            if source.strings != feature.strings and not _is_null(kind):
                has, wants = ("strings", "integers")[:: 1 if source.strings else -1]
                raise UserError(
                    f"{path}: column {source.column!r} has {has} ({str(kind)[:60]}), but the model"
                    f" was trained on {wants} there"
                )
            separator = separators.get(source.column, "|")
            self._sources.append((feature, replace(source, separator=separator)))

    def suspects(self, table: Any) -> Mask:
        """``[n]``: rows with a cell that the model may not take."""
        wrong = np.zeros(table.num_rows, np.bool_)
        for name in self._dense:
            wrong |= self._wrong_numbers(whole_array(table.column(name)))
        for feature, source in self._sources:
            array = whole_array(table.column(source.column))
            if not source.many:
                wrong |= _flags(_not_whole(array))
                continue
            if is_string_type(array.type):
                continue
            if source.weighted:
                wrong |= _wrong_weights(source, array, table)
                items = array.keys if pa.types.is_map(array.type) else pc.list_flatten(array)
                if pa.types.is_floating(items.type):
                    wrong |= True
                continue
            items = pc.list_flatten(array)
            bad = _not_whole(items)
            wrong[_rows_of(array, bad)] = True
            if not feature.many:
                wrong |= _flags(pc.fill_null(pc.greater(pc.list_value_length(array), 1), False))
        return wrong

    def _wrong_numbers(self, array: Any) -> Mask:
        numbers = numbers_of(array)
        with np.errstate(over="ignore"):
            wrong = np.isinf(numbers)
        if self._schema.dense_missing == "refuse":
            wrong |= np.isnan(numbers)
        if pa.types.is_float64(array.type):
            over = pc.fill_null(pc.greater(pc.abs(array), _FLOAT32_MAX), False)
            wrong |= _flags(over)
        return wrong

    def host_batch(self, table: Any) -> HostBatch:
        """The package's arguments for the rows of ``table``, which has no `suspects`.

        Raises:
            CellError: a cell is not what its column is, where only reading it could tell.
        """
        rows = table.num_rows
        dense = np.empty((rows, len(self._dense)), np.float32)
        for place, name in enumerate(self._dense):
            dense[:, place] = read_column(name, table, numbers_of)
        plain, scored = self._group("id_list", table), self._group("id_score_list", table)
        weights = scored[2]
        return HostBatch.of(
            torch.from_numpy(dense),
            (torch.from_numpy(plain[0]), torch.from_numpy(plain[1])),
            None
            if weights is None
            else (
                torch.from_numpy(scored[0]),
                torch.from_numpy(scored[1]),
                torch.from_numpy(weights),
            ),
        )

    def _group(self, group: Group, table: Any) -> Jagged:
        """Lengths ``[F * n]``, ids ``[N]`` and, if they have any, weights ``[N]`` of a group."""
        lengths = [np.empty(0, np.int32)]
        values = [np.empty(0, np.int64)]
        weights: list[npt.NDArray[np.float32]] = []
        for feature, source in self._sources:
            if feature.group != group:
                continue
            if source.many:
                part = jagged_of(source, table)
                if int(part.lengths.sum()) != len(part.values):  # some lists were cut
                    part = part.at(np.arange(table.num_rows))
                lengths.append(part.lengths)
                values.append(part.values)
                if part.weights is not None:
                    weights.append(part.weights)
            else:
                ids, present = read_column(source.column, table, ids_of)
                lengths.append(
                    np.ones(len(ids), np.int32) if present is None else present.astype(np.int32)
                )
                values.append(ids if present is None else ids[present])
        return (
            np.concatenate(lengths),
            np.concatenate(values),
            np.concatenate(weights) if weights else None,
        )


def near_column(name: str, there: list[str]) -> str:
    """The end of a message about a column that a file lacks."""
    close = difflib.get_close_matches(name, there, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(there[:20])}"


def _is_null(kind: Any) -> bool:
    items = kind.value_type if is_list(kind) else kind
    return bool(pa.types.is_null(items))


def _flags(mask: Any) -> Mask:
    flags: Mask = mask.to_numpy(zero_copy_only=False)
    return flags


def _not_whole(array: Any) -> Any:
    """Which values of an array of ids are floats that no integer is the same as."""
    if not pa.types.is_floating(array.type):
        return pa.repeat(pa.scalar(False), len(array))
    inside = pc.less_equal(pc.abs(array), float(_EXACT))
    whole = pc.and_(inside, pc.equal(array, pc.trunc(array)))
    wrong = pc.and_(pc.invert(whole), pc.invert(pc.is_nan(array)))
    return pc.fill_null(wrong, False)


def _rows_of(array: Any, bad: Any) -> npt.NDArray[np.int64]:
    """The rows of an array of lists that one of the items ``bad`` is in."""
    parents = pc.list_parent_indices(array).filter(bad)
    rows: npt.NDArray[np.int64] = parents.to_numpy(zero_copy_only=False).astype(np.int64)
    return rows


def _wrong_weights(source: SparseSource, array: Any, table: Any) -> Mask:
    """Rows whose ids or weights hold a null or a number that is not finite, or are not as many."""
    if source.weights is None:
        lists = pa.ListArray.from_arrays(array.offsets, array.keys)
        weights = pa.ListArray.from_arrays(array.offsets, array.items)
        unequal = np.zeros(len(array), np.bool_)
    else:
        lists, weights = array, whole_array(table.column(source.weights))
        counts = [
            pc.fill_null(pc.list_value_length(each), 0).to_numpy(zero_copy_only=False)
            for each in (lists, weights)
        ]
        unequal = counts[0] != counts[1]
    unequal[_rows_of(lists, pc.is_null(pc.list_flatten(lists)))] = True
    numbers = pc.list_flatten(weights).cast(pa.float64())
    fits = pc.fill_null(pc.less_equal(pc.abs(numbers), _FLOAT32_MAX), False)
    unequal[_rows_of(weights, pc.invert(fits))] = True
    return unequal
