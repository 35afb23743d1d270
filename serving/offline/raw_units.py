"""Files of raw rows cut into units, which are read by themselves and in any order.

A unit is defined by the files alone: neighbouring row groups of Parquet, or a range of the rows of a
large one; record batches of Arrow's file format; a block of text.  Text is cut where it is read, by one
process, and travels with its unit; what it means is found out by whoever works on the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tessera.errors import UserError
from tessera.serving.offline.raw_columns import column_names
from tessera.serving.package.schema import InputSchema
from tessera.training.data.remote import Location, arrow_source, random_access
from tessera.training.data.table.common import DAMAGED, missing_column, unreadable
from tessera.training.data.table.files import FoundFile
from tessera.training.data.table.opening import partition_value

UNIT_ROWS = 1 << 17
UNIT_BYTES = 64 << 20
CHUNK_ROWS = 1 << 14
CHUNK_BYTES = 64 << 20
"""A unit is read in pieces of at most so many rows and about so many decoded bytes."""

TEXT_FORMATS = ("csv", "tsv", "jsonl")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A column of the input that goes into the output, and its name there."""

    column: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How units are read; the same for all.

    Attributes:
        schema: the model's inputs.
        kept: columns that are carried into the output.
        separators: by column, what stands between the items of a list that is a text.
        criteo: whether files of text have Criteo's own columns and no header.
    """

    schema: InputSchema
    kept: tuple[Kept, ...] = ()
    separators: Mapping[str, str] = field(default_factory=dict)
    criteo: bool = False

    def names(self) -> list[str]:
        """The columns that are read of a file."""
        names = [*column_names(self.schema), *(own.column for own in self.kept)]
        return list(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of a file.

    Attributes:
        number: its place among the units of all files.
        file: where it is.
        pieces: numbers of row groups or record batches.
        start: the first row of these that belongs to it.
        stop: the row behind its last; None: all.
        text: of a file of text, its rows: record batches of strings in Arrow's stream format for CSV,
            lines otherwise.
        broken: rows of CSV that could not be read, by their place among the unit's, with the reason.
        first_row: what messages call its first row; 0 of Arrow files, whose batches do not say what is
            before them: then the rows are counted from the unit's first, as 0.
        source_bytes: how much of the file it is, about.
    """

    number: int
    file: FoundFile
    pieces: tuple[int, ...] = ()
    start: int = 0
    stop: int | None = None
    text: bytes | None = None
    broken: tuple[tuple[int, str], ...] = ()
    first_row: int = 1
    source_bytes: int = 0

    def __str__(self) -> str:
        return f"part {self.number + 1} of the data, in {self.file.path},"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows of a unit.

    Attributes:
        rows: how many they are.
        numbers: ``[rows]``, what messages call them.
        table: the model's columns of those rows whose cells have their types; None: there is none.
        places: of the rows of ``table``, their places; None: it has all of them.
        odd: other rows by their places: their values by column, which the rules for single rows are
            asked about, or the reason why the row cannot be read.
        kept: the columns that go into the output, ``rows`` of each.
    """

    rows: int
    numbers: npt.NDArray[np.int64]
    table: Any
    places: npt.NDArray[np.int64] | None = None
    odd: tuple[tuple[int, dict[str, Any] | str], ...] = ()
    kept: Any = None


def partitions_of(file: FoundFile) -> dict[str, Any]:
    """The values that the names of the file's folders give."""
    return {name: partition_value(value) for name, value in file.partitions.items()}


def _type_of(value: str | int | None) -> Any:
    return pa.string() if isinstance(value, str) else pa.int64()


def with_partitions(table: Any, file: FoundFile, names: Sequence[str]) -> Any:
    """``table`` with those of the columns ``names`` that the file's folders give."""
    for name, value in partitions_of(file).items():
        if name in names:
            column = pa.repeat(pa.scalar(value, _type_of(value)), table.num_rows)
            table = table.append_column(name, column)
    return table


def kept_columns(table: Any, kept: Sequence[Kept]) -> Any:
    """The columns that go into the output, under their names there, without dictionaries."""
    arrays = []
    for own in kept:
        column = table.column(own.column)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        arrays.append(column)
    return pa.table(arrays, names=[own.name for own in kept])


def typed_units(file: FoundFile, first: int) -> Iterator[Unit]:
    """The units of a Parquet or Arrow file, numbered from ``first``.

    Raises:
        UserError: the file is damaged.
    """
    cut = _parquet_units if file.format == "parquet" else _arrow_units
    size = file.path.stat().st_size
    try:
        found = list(cut(file))
    except DAMAGED as error:
        raise unreadable(file.path, error) from error
    for number, (pieces, start, stop, first_row) in enumerate(found, first):
        yield Unit(
            number=number,
            file=file,
            pieces=pieces,
            start=start,
            stop=stop,
            first_row=first_row,
            source_bytes=size // len(found),
        )


_Range = tuple[tuple[int, ...], int, int | None, int]
"""Pieces, the first row of them and the row behind the last, and the first row's number in the file."""


def _parquet_units(file: FoundFile) -> Iterator[_Range]:
    with pq.ParquetFile(arrow_source(file.path)) as found:
        metadata = found.metadata
    groups: list[int] = []
    rows = held = 0
    first_row = 1
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        size = group.total_byte_size
        if groups and (rows + group.num_rows > UNIT_ROWS or held + size > UNIT_BYTES):
            yield tuple(groups), 0, rows, first_row
            first_row += rows
            groups, rows, held = [], 0, 0
        if group.num_rows > UNIT_ROWS:
            for start in range(0, group.num_rows, UNIT_ROWS):
                stop = min(start + UNIT_ROWS, group.num_rows)
                yield (number,), start, stop, first_row + start
            first_row += group.num_rows
        elif group.num_rows:
            groups.append(number)
            rows += group.num_rows
            held += size
    if groups:
        yield tuple(groups), 0, rows, first_row


def _arrow_units(file: FoundFile) -> Iterator[_Range]:
    with random_access(file.path) as source:
        try:
            count = pa.ipc.open_file(source).num_record_batches
        except pa.ArrowInvalid:
            source.seek(0)
            pa.ipc.open_stream(source)
            yield (), 0, None, 1  # a stream is read from its beginning
            return
    per_unit = max(1, count * UNIT_BYTES // max(1, file.path.stat().st_size))
    for start in range(0, count, per_unit):
        # How many rows batches have is known once they are read.
        yield tuple(range(start, min(start + per_unit, count))), 0, None, 0


def file_schema(file: FoundFile) -> Any:
    """The Arrow schema of a Parquet or Arrow file, with the columns that its folders name.

    Raises:
        UserError: the file is damaged.
    """
    try:
        if file.format == "parquet":
            schema = pq.read_schema(arrow_source(file.path))
        else:
            with random_access(file.path) as source:
                try:
                    schema = pa.ipc.open_file(source).schema
                except pa.ArrowInvalid:
                    source.seek(0)
                    schema = pa.ipc.open_stream(source).schema
    except DAMAGED as error:
        raise unreadable(file.path, error) from error
    for name, value in partitions_of(file).items():
        if name in schema.names:
            schema = schema.remove(schema.get_field_index(name))
        schema = schema.append(pa.field(name, _type_of(value)))
    return schema


def typed_chunks(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    """The rows of a unit of a Parquet or Arrow file.

    Raises:
        UserError: the file is damaged or lacks a column.
    """
    file, names = unit.file, reading.names()
    stored = [name for name in names if name not in file.partitions]
    batches = _parquet_batches if file.format == "parquet" else _arrow_batches
    row = 0
    number = unit.first_row
    with ExitStack() as stack:
        try:
            for batch in batches(unit, stored, stack):
                first, row = row, row + batch.num_rows
                begin = max(unit.start - first, 0)
                end = (
                    batch.num_rows if unit.stop is None else min(unit.stop - first, batch.num_rows)
                )
                if end <= begin:
                    continue
                table = pa.Table.from_batches([batch.slice(begin, end - begin)])
                table = with_partitions(table, file, names)
                rows = table.num_rows
                numbers = np.arange(number, number + rows)
                number += rows
                kept = kept_columns(table, reading.kept)
                yield Chunk(rows=rows, numbers=numbers, table=table, kept=kept)
                if unit.stop is not None and row >= unit.stop:
                    return
        except DAMAGED as error:
            raise unreadable(file.path, error) from error


def _parquet_batches(unit: Unit, names: list[str], stack: ExitStack) -> Iterator[Any]:
    path = unit.file.path
    found = stack.enter_context(pq.ParquetFile(arrow_source(path), pre_buffer=False))
    _refuse_missing(path, names, found.schema_arrow.names)
    rows = size = 1
    for number in unit.pieces:
        group = found.metadata.row_group(number)
        rows, size = rows + group.num_rows, size + group.total_byte_size
    at_once = max(64, min(CHUNK_ROWS, CHUNK_BYTES * rows // size))
    yield from found.iter_batches(
        at_once, row_groups=list(unit.pieces), columns=names, use_threads=False
    )


def _arrow_batches(unit: Unit, names: list[str], stack: ExitStack) -> Iterator[Any]:
    path = unit.file.path
    source = stack.enter_context(random_access(path))
    if unit.pieces:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(number) for number in unit.pieces)
    else:
        batches = iter(reader := pa.ipc.open_stream(source))
    _refuse_missing(path, names, reader.schema.names)
    for batch in batches:
        batch.validate(full=True)  # damaged offsets would lead anywhere in memory
        own = batch.select(names)
        at_once = max(64, min(CHUNK_ROWS, CHUNK_BYTES * own.num_rows // max(1, own.nbytes)))
        for begin in range(0, own.num_rows, at_once):
            yield own.slice(begin, at_once)


def _refuse_missing(path: Location, names: list[str], there: list[str]) -> None:
    for name in names:
        if name not in there:
            raise missing_column(path, name, there)


def kept_types(files: Sequence[FoundFile], reading: Reading) -> dict[str, Any]:
    """The Arrow types of the columns that are kept, by their names in the output; text is strings.

    Raises:
        UserError: a file lacks a column, or has it with another type than the files before it.
    """
    types: dict[str, Any] = {}
    first: dict[str, Location] = {}
    for file in files if reading.kept else ():
        schema = None if file.format in TEXT_FORMATS else file_schema(file)
        for own in reading.kept:
            kind = pa.string()
            if schema is not None:
                if own.column not in schema.names:
                    raise missing_column(file.path, own.column, schema.names)
                kind = schema.field(own.column).type
                kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            elif own.column in file.partitions:
                kind = _type_of(partitions_of(file)[own.column])
            if types.setdefault(own.name, kind) != kind:
                raise UserError(
                    f"{file.path}: column {own.column!r} has the type {str(kind)[:60]}, but in"
                    f" {first[own.name]} it has {str(types[own.name])[:60]}; keep columns that are"
                    " alike in all files"
                )
            first.setdefault(own.name, file.path)
    return types
