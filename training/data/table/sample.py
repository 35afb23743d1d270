"""A sample of a table's rows with the types that its columns seem to have."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from tessera.errors import UserError
from tessera.training.data.remote import arrow_source, random_access
from tessera.training.data.table.common import (
    BLOCK_BYTES,
    DAMAGED,
    Utf8Text,
    missing_column,
    open_bytes,
    unreadable,
)
from tessera.training.data.table.convert import csv_delimiter, csv_names, csv_null_values
from tessera.training.data.table.files import FoundFile
from tessera.training.data.table.opening import partition_value
from tessera.training.data.table.text import TextColumn

MOST_FILES = 10
MOST_COLUMNS = 2000
_SHARE_OF_LISTS = 0.02


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first rows of some files.

    Attributes:
        table: the rows.
        total_rows: how many rows all files have, of text files about.
        text: which columns hold text without a type, as those of CSV do.
        separators: what separates the items of the columns of lists that were text.
    """

    table: Any
    total_rows: int
    text: bool
    separators: dict[str, str]


def read_sample(files: list[FoundFile], rows: int) -> Sample:
    """About ``rows`` rows, from the beginnings of up to `MOST_FILES` of the files.

    Raises:
        UserError: a file cannot be read, or the files have no rows or do not have the same columns.
    """
    step = -(-len(files) // MOST_FILES)
    chosen = files[::step]
    share = max(1, -(-rows // len(chosen)))
    parts, total = [], 0.0
    for file in chosen:
        part, of_file = _of_file(file, share)
        if part.num_columns > MOST_COLUMNS:
            raise UserError(
                f"{file.path}: has {part.num_columns} columns; a schema is inferred for up to"
                f" {MOST_COLUMNS}; write data.columns yourself or choose columns before"
            )
        for name, value in file.partitions.items():
            if name in part.column_names:
                part = part.drop([name])
            typed = partition_value(value)
            kind = pa.string() if isinstance(typed, str) else pa.int64()
            part = part.append_column(name, pa.repeat(pa.scalar(typed, kind), part.num_rows))
        parts.append(part)
        total += of_file
    _check_alike(chosen, parts)
    table = pa.concat_tables(parts, promote_options="permissive").combine_chunks()
    if not table.num_rows:
        raise UserError(f"{files[0].path}: has no rows; give a file that has some")
    separators: dict[str, str] = {}
    text = chosen[0].format in {"csv", "tsv"}
    if text:
        table, separators = _with_types(table)
    total = total * len(files) / len(chosen)
    return Sample(table=table, total_rows=int(total), text=text, separators=separators)


def _check_alike(files: list[FoundFile], parts: list[Any]) -> None:
    """Refuse a file that lacks a column of another, which training would, or has it with another type."""
    schema, there = parts[0].schema, dict.fromkeys(parts[0].column_names, files[0])
    for file, part in zip(files[1:], parts[1:], strict=True):
        if file.format != "jsonl":  # whose rows may lack a column that later ones have
            for name in there.keys() - set(part.column_names):
                raise missing_column(file.path, name, part.column_names)
            for name in set(part.column_names) - there.keys():
                raise missing_column(files[0].path, name, list(there))
        try:
            schema = pa.unify_schemas([schema, part.schema], promote_options="permissive")
        except pa.ArrowException as error:
            reason = str(error).splitlines()[0].removeprefix("Unable to merge: ")
            raise UserError(
                f"{file.path}: its columns are not those of the files before it: {reason}; mend the file"
                " or leave it out"
            ) from error


def _of_file(file: FoundFile, rows: int) -> tuple[Any, float]:
    """The first rows of a file, and how many it has, about."""
    readers = {
        "parquet": _parquet,
        "arrow": _arrow,
        "csv": _csv,
        "tsv": _csv,
        "jsonl": _jsonl,
    }
    try:
        return readers[file.format](file, rows)
    except DAMAGED as error:
        raise unreadable(file.path, error) from error


def _parquet(file: FoundFile, rows: int) -> tuple[Any, float]:
    with pq.ParquetFile(arrow_source(file.path)) as found:
        if found.schema_arrow.names and len(found.schema_arrow.names) > MOST_COLUMNS:
            return found.schema_arrow.empty_table(), 0.0
        batches = found.iter_batches(min(rows, 1 << 14), use_threads=False)
        taken = _taken(batches, rows)
        table = pa.Table.from_batches(taken, schema=found.schema_arrow)
        return table.slice(0, rows), float(found.metadata.num_rows)


def _taken(batches: Iterator[Any], rows: int) -> list[Any]:
    taken, count = [], 0
    for batch in batches:
        taken.append(batch)
        count += batch.num_rows
        if count >= rows:
            break
    return taken


def _arrow(file: FoundFile, rows: int) -> tuple[Any, float]:
    with random_access(file.path) as source:
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            reader = pa.ipc.open_stream(source)
            taken = _taken(iter(reader), rows)
            share = source.tell() / source.size()
        else:
            batches = reader.num_record_batches
            taken = _taken((reader.get_batch(number) for number in range(batches)), rows)
            share = len(taken) / max(1, batches)
        table = pa.Table.from_batches(taken, schema=reader.schema)
        table.validate(full=True)  # damaged offsets would lead anywhere in memory
        total = table.num_rows / max(share, 1e-9)
        table = table.slice(0, rows)
        return table.take(pa.array(range(table.num_rows))), total  # not memory of the file


def _csv(file: FoundFile, rows: int) -> tuple[Any, float]:
    with ExitStack() as stack:
        text, raw = open_bytes(file, stack)
        header = text.readline(BLOCK_BYTES)
        delimiter = csv_delimiter(file, header)
        parse = pa_csv.ParseOptions(
            delimiter=delimiter, newlines_in_values=True, invalid_row_handler=lambda _: "skip"
        )
        names = csv_names(header, delimiter)
        text.seek(0)
        reader = pa_csv.open_csv(
            Utf8Text(text),
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            parse_options=parse,
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=csv_null_values(),
            ),
        )
        taken = _taken(iter(reader), rows)
        count = sum(batch.num_rows for batch in taken)
        share = raw.tell() / max(1, file.path.stat().st_size)
        table = pa.Table.from_batches(taken, schema=reader.schema)
        return table.slice(0, rows), max(count, count / max(share, 1e-9))


def _jsonl(file: FoundFile, rows: int) -> tuple[Any, float]:
    with ExitStack() as stack:
        text, raw = open_bytes(file, stack)
        block = text.read(BLOCK_BYTES) + text.readline()
        share = raw.tell() / max(1, file.path.stat().st_size)
    try:
        table = pa_json.read_json(
            io.BytesIO(block), read_options=pa_json.ReadOptions(block_size=len(block) + 1)
        )
        structs = [f.name for f in table.schema if pa.types.is_struct(f.type)]
        if structs:  # objects with other keys in every row are maps
            raise pa.ArrowInvalid
    except pa.ArrowException:
        table = _json_table(block)
    return table.slice(0, rows), max(table.num_rows, table.num_rows / max(share, 1e-9))


def _json_table(block: bytes) -> Any:
    found = []
    for line in block.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    names = list(dict.fromkeys(name for row in found for name in row))
    columns = {}
    for name in names:
        cells = [row.get(name) for row in found]
        if all(isinstance(cell, dict) or cell is None for cell in cells):
            kind = pa.map_(pa.string(), pa.float32())
            pairs = [None if cell is None else list(cell.items()) for cell in cells]
            columns[name] = _array(pairs, kind)
        else:
            columns[name] = _array(cells, None)
    return pa.table(columns)


def _array(cells: list[Any], kind: Any) -> Any:
    try:
        return pa.array(cells, kind)
    except pa.ArrowException:
        return pa.array([None if cell is None else json.dumps(cell) for cell in cells])


def _with_types(table: Any) -> tuple[Any, dict[str, str]]:
    """A table of strings with the types that they seem to have, and the separators of lists."""
    columns, separators = {}, {}
    for name in table.column_names:
        text = pa.concat_arrays(table.column(name).chunks)
        columns[name], separator = _typed(name, text)
        if separator is not None:
            separators[name] = separator
    return pa.table(columns), separators


def _typed(name: str, text: Any) -> tuple[Any, str | None]:
    known = text.drop_null()
    if not len(known):
        return pa.nulls(len(text)), None
    for holds, strings in (("id", False), ("number", None), ("time", True)):
        column = TextColumn(name=name, holds=holds, strings=strings)  # type: ignore[arg-type] # words of Holds
        plain = holds != "id" or TextColumn(name=name, holds="id").settled(known).strings is False
        if plain:
            values, bad = column.read(text)
            wrong = 0 if bad is None else pc.sum(bad).as_py() or 0
            if wrong <= len(known) // 1000:  # malformed cells do not decide
                return values, None
    separator = _separator(known)
    if separator is not None:
        column = TextColumn(name=name, holds="id", many=True, separator=separator).settled(known)
        return column.read(text)[0], separator
    return text, None


def _separator(text: Any) -> str | None:
    """What separates items where cells are lists: many cells have it, and items repeat."""
    if pc.mean(pc.starts_with(text, "[")).as_py() > 0.5:
        return ","
    for separator in ("|", ";", ",", " "):
        share = pc.mean(pc.match_substring(text, separator)).as_py()
        if share < _SHARE_OF_LISTS:
            continue
        items = pc.list_flatten(pc.split_pattern(text, separator))
        if pc.count_distinct(items).as_py() < min(len(items) / 2, pc.count_distinct(text).as_py()):
            return separator
    return None
