"""Rows of raw values from files: CSV, TSV, Parquet and Arrow, and JSON lines, in batches.

A file of any size is read batch by batch.  Cells of CSV are texts: numbers are read from them where
the model takes numbers, an empty cell and the usual words (NULL, NA, NaN, None) are missing values,
and lists are written as ``a|b|c`` or ``[1, 2, 3]``.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from tessera.errors import UserError
from tessera.serving.package.schema import InputSchema

MISSING_WORDS = frozenset(("", "NULL", "null", "NA", "N/A", "NaN", "nan", "None"))
_TRUTHS = {"true": 1, "false": 0}
_DELIMITERS = ",;\t|"

_Rows: TypeAlias = Iterator[tuple[Any, int]]
"""Some rows each, and how many they are."""


@dataclass(frozen=True)
class RowBatch:
    """Some consecutive rows of a file.

    Attributes:
        first: the number of the first row, from 1.
        size: how many there are.
        rows: what `tessera.serving.client.rows.rows_to_parts` takes.
    """

    first: int
    size: int
    rows: Any


def read_row_batches(path: Path, *, batch_size: int, schema: InputSchema) -> Iterator[RowBatch]:
    """The rows of a file in batches of at most ``batch_size``.

    Raises:
        UserError: the file's name ends in none of the known ways, or it cannot be read.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: its name ends in none of {', '.join(_READERS)}")
    return _numbered(reader(path, batch_size, schema))


def row_batches(rows: Iterable[Mapping[str, Any]], batch_size: int) -> Iterator[RowBatch]:
    """Rows that are read already, in batches of at most ``batch_size``."""
    return _numbered(_chunks(rows, batch_size))


def _numbered(batches: _Rows) -> Iterator[RowBatch]:
    first = 1
    for rows, size in batches:
        yield RowBatch(first, size, rows)
        first += size


def _chunks(rows: Iterable[Any], batch_size: int) -> _Rows:
    source = iter(rows)
    while chunk := list(islice(source, batch_size)):
        yield chunk, len(chunk)


def json_rows(lines: Iterable[str], name: str) -> Iterator[Mapping[str, Any]]:
    """The objects of JSON lines; empty lines are skipped.  ``name`` is the input's, for errors."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {number}: give an object with the row's columns")
        yield row


def _csv(path: Path, batch_size: int, schema: InputSchema) -> _Rows:
    with path.open(encoding="utf-8-sig", newline="") as text:
        header = text.readline()
        text.seek(0)
        delimiter = "\t" if path.suffix.lower() == ".tsv" else max(_DELIMITERS, key=header.count)
        yield from _chunks(_csv_rows(text, str(path), delimiter, schema), batch_size)


def _csv_rows(
    text: TextIO, name: str, delimiter: str, schema: InputSchema
) -> Iterator[dict[str, Any]]:
    readers = cell_readers(schema)
    rows = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():
                raise UserError(
                    f"{name}, line {rows.line_num}: the row has another number of cells than the "
                    f"header, {len(rows.fieldnames or ())}"
                )
            yield {column: readers.get(column, _as_text)(cell) for column, cell in row.items()}
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{name}, line {rows.line_num}: {error}") from error


def cell_readers(
    schema: InputSchema, separators: Mapping[str, str] | None = None
) -> dict[str, Callable[[str], Any]]:
    """How the cells of each column are read.  What cannot be read stays a text, which is then refused.

    ``separators`` are, by column, what stands between the items of its lists; ``|`` where it says nothing.
    """
    given = separators or {}
    readers: dict[str, Callable[[str], Any]] = {}
    columns = schema.dense_columns or ("",) * len(schema.dense_features)
    for feature, column in zip(schema.dense_features, columns, strict=True):
        readers[column or feature] = _as_number
    for sparse in schema.features:
        read: Callable[[str], Any] = _as_text if sparse.strings else _as_integer
        name, weights = sparse.column or sparse.name, sparse.weights_column
        readers[name] = _list_reader(read, given.get(name, "|")) if sparse.many else read
        if weights:
            readers[weights] = _list_reader(_as_number, given.get(weights, "|"))
    return readers


def _as_text(cell: str) -> str | None:
    return None if cell in MISSING_WORDS else cell


def _as_number(cell: str) -> Any:
    if cell.strip() in MISSING_WORDS:
        return None
    try:
        return float(cell)
    except ValueError:
        return _TRUTHS.get(cell.strip().lower(), cell)


def _as_integer(cell: str) -> Any:
    if cell.strip() in MISSING_WORDS:
        return None
    try:
        return int(cell)
    except ValueError:
        return _as_number(cell)


def _list_reader(read: Callable[[str], Any], between: str) -> Callable[[str], Any]:
    def read_list(cell: str) -> list[Any] | None:
        if cell in MISSING_WORDS:
            return None
        inner = cell.strip()
        separator = between
        if inner.startswith("[") and inner.endswith("]"):
            inner, separator = inner[1:-1], ","
        items = inner.split(separator) if inner.strip() else []
        return [read(item.strip(" '\"")) for item in items]

    return read_list


def _arrow_batches(batches: Iterable[Any], batch_size: int) -> _Rows:
    for batch in batches:
        for begin in range(0, batch.num_rows, batch_size):
            part = batch.slice(begin, batch_size)
            yield part, part.num_rows


def _parquet(path: Path, batch_size: int, _schema: InputSchema) -> _Rows:
    import pyarrow as pa  # noqa: PLC0415 - only for those who have such files
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            yield from _arrow_batches(file.iter_batches(batch_size=batch_size), batch_size)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({error})") from error


def _arrow(path: Path, batch_size: int, _schema: InputSchema) -> _Rows:
    import pyarrow as pa  # noqa: PLC0415 - only for those who have such files

    try:
        with pa.memory_map(str(path)) as source:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(place) for place in range(file.num_record_batches))
            yield from _arrow_batches(batches, batch_size)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not an Arrow file that can be read ({error})") from error


_READERS: dict[str, Callable[[Path, int, InputSchema], _Rows]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}

ROW_FILES = frozenset(_READERS)
"""The ends of the names of files that `read_row_batches` reads."""
