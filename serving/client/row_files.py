"""Rows of raw values from files: CSV, TSV, Parquet and Arrow, and JSON lines, in batches.

A file of any size is read batch by batch.  Cells of CSV are texts and are read as training read them:
numbers where the model takes numbers; an empty cell and the usual words (NULL, NA, NaN, None) are missing
values where they are not quoted; and lists are taken apart at the sign that stood between their items.
Criteo's own files, which have no header, are known by their columns.  Files of text may be compressed
by gzip, as training reads them; their names then end in ``.gz``.
"""

from __future__ import annotations

import contextlib
import csv
import difflib
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from tessera.errors import UserError
from tessera.serving.client.rows import split_list, whole_number
from tessera.serving.package.schema import InputSchema

MISSING_WORDS = frozenset(("", "NULL", "null", "NA", "N/A", "NaN", "nan", "None"))
CRITEO_COLUMNS = (
    "label",
    *(f"I{number}" for number in range(1, 14)),
    *(f"C{number}" for number in range(1, 27)),
)
"""The columns of Criteo's own files, in their order."""

_TRUTHS = {"true": 1, "false": 0}
_DELIMITERS = ",;\t|"
_NUMBER = re.compile(
    r"\s*[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|nan|inf(inity)?)\s*", re.IGNORECASE
)
_TEXT_ENDS = frozenset((".csv", ".tsv", ".jsonl"))
DAMAGED_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
"""What reading a file of `open_text` may raise that is not whole."""
_BLOCK_BYTES = 1 << 20
_LONGEST_HEADER = 8 << 20

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
    reader = _READERS.get(row_file_end(path))
    if reader is None:
        raise UserError(f"{path}: its name ends in none of {', '.join(_READERS)}")
    return _numbered(reader(path, batch_size, schema))


def row_file_end(path: Path) -> str:
    """The end of a file's name that says its format: ``.csv`` of ``rows.csv.gz``, too."""
    end = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if end == ".gz" else ""
    return inner if inner in _TEXT_ENDS else end


def open_text(path: Path) -> BinaryIO:
    """The bytes of a file of text, which is compressed where its name ends in ``.gz``.

    Raises:
        OSError: there is no such file.
    """
    if path.suffix.lower() == ".gz":
        return cast("BinaryIO", gzip.open(path))
    return path.open("rb")


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


def json_rows(
    lines: Iterable[str], name: str, schema: InputSchema | None = None
) -> Iterator[Mapping[str, Any]]:
    """The objects of JSON lines; empty lines are skipped.  ``name`` is the input's, for errors."""
    numbers = () if schema is None else _dense_columns(schema)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise UserError(f"{name}, line {number}: give an object with the row's columns")
        for column in numbers:
            # Training reads numbers of JSON as float64 before they become float32.
            if type(row.get(column)) is int:
                with contextlib.suppress(OverflowError):
                    row[column] = float(row[column])
        yield row


def _dense_columns(schema: InputSchema) -> list[str]:
    columns = schema.dense_columns or ("",) * len(schema.dense_features)
    return [column or name for name, column in zip(schema.dense_features, columns, strict=True)]


def _csv(path: Path, batch_size: int, schema: InputSchema) -> _Rows:
    import pyarrow as pa  # noqa: PLC0415 - only for those who have such files
    import pyarrow.csv as pa_csv  # noqa: PLC0415

    try:
        with open_text(path) as file:
            header = file.readline(_LONGEST_HEADER)
            delimiter = "\t" if row_file_end(path) == ".tsv" else _delimiter(header)
            names = _first_row(header, delimiter)
            criteo = _criteo_names(names, schema)
            _check_columns(path, criteo or names, schema)
            file.seek(0)
            reader = pa_csv.open_csv(
                file,
                read_options=pa_csv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, column_names=criteo
                ),
                parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(criteo or names, pa.string()),
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    null_values=sorted(MISSING_WORDS),
                ),
            )
            readers = cell_readers(schema, whole_dense=criteo is not None)
            for batch in reader:
                for begin in range(0, batch.num_rows, batch_size):
                    part = batch.slice(begin, batch_size)
                    yield _read_cells(part, readers), part.num_rows
    except (pa.ArrowException, UnicodeDecodeError, csv.Error, *DAMAGED_GZIP) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"{path}: not a file of rows that can be read ({reason})") from error


def _check_columns(path: Path, there: Sequence[str], schema: InputSchema) -> None:
    """Refuse a file without a column of the model, whose values would all be taken for missing."""
    wanted = [*_dense_columns(schema), *(one.column or one.name for one in schema.features)]
    wanted += [one.weights_column for one in schema.features if one.weights_column]
    for name in wanted:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(there[:20])}"
            raise UserError(f"{path}: has no column {name!r}; {hint}")


def _delimiter(header: bytes) -> str:
    return max(_DELIMITERS, key=lambda sign: header.count(sign.encode()))


def _first_row(header: bytes, delimiter: str) -> list[str]:
    return next(csv.reader([header.decode("utf-8-sig")], delimiter=delimiter, strict=True), [])


def _criteo_names(first: list[str], schema: InputSchema) -> list[str] | None:
    """The columns of a file without a header in Criteo's own format; None: it is not one."""
    taken = {*_dense_columns(schema), *(one.column or one.name for one in schema.features)}
    if taken != set(CRITEO_COLUMNS[1:]) or taken & set(first):
        return None
    return {len(own): list(own) for own in (CRITEO_COLUMNS, CRITEO_COLUMNS[1:])}.get(len(first))


def _read_cells(batch: Any, readers: Mapping[str, Callable[[str], Any]]) -> list[dict[str, Any]]:
    """The rows of a batch of texts, each cell read as its column is."""
    columns = [
        [None if cell is None else readers.get(name, str)(cell) for cell in column.to_pylist()]
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def cell_readers(schema: InputSchema, *, whole_dense: bool) -> dict[str, Callable[[str], Any]]:
    """How the cells of each column are read.  What cannot be read stays a text, which is then refused.

    ``whole_dense``: dense values are whole numbers, as in Criteo's format, and are rounded once.
    """
    dense = _as_integer if whole_dense else _as_number
    readers: dict[str, Callable[[str], Any]] = dict.fromkeys(_dense_columns(schema), dense)
    for sparse in schema.features:
        read: Callable[[str], Any] = str if sparse.strings or sparse.hex else _as_integer
        name = sparse.column or sparse.name
        readers[name] = _list_reader(read, sparse.separator) if sparse.many else read
        if sparse.weights_column:
            readers[sparse.weights_column] = _list_reader(_as_number, "")
    return readers


def _as_number(cell: str) -> Any:
    if _NUMBER.fullmatch(cell):
        return float(cell)
    return _TRUTHS.get(cell.lower(), cell)


def _as_integer(cell: str) -> Any:
    number = whole_number(cell)
    return _as_number(cell) if isinstance(number, str) else number


def _list_reader(read: Callable[[str], Any], separator: str) -> Callable[[str], list[Any]]:
    """Lists of items that ``separator`` stands between; empty: ``,`` within brackets, else ``|``."""

    def read_list(cell: str) -> list[Any]:
        sign = separator or ("," if cell.strip().startswith("[") else "|")
        return [read(item) for item in split_list(cell, sign)]

    return read_list


def _arrow_batches(batches: Iterable[Any], batch_size: int) -> _Rows:
    for batch in batches:
        for begin in range(0, batch.num_rows, batch_size):
            part = batch.slice(begin, batch_size)
            yield part, part.num_rows


def _parquet(path: Path, batch_size: int, schema: InputSchema) -> _Rows:
    import pyarrow as pa  # noqa: PLC0415 - only for those who have such files
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(path) as file:
            _check_columns(path, file.schema_arrow.names, schema)
            yield from _arrow_batches(file.iter_batches(batch_size=batch_size), batch_size)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a Parquet file that can be read ({error})") from error


def _arrow(path: Path, batch_size: int, schema: InputSchema) -> _Rows:
    import pyarrow as pa  # noqa: PLC0415 - only for those who have such files

    try:
        with pa.memory_map(str(path)) as source:
            file = pa.ipc.open_file(source)
            _check_columns(path, file.schema.names, schema)
            batches = (file.get_batch(place) for place in range(file.num_record_batches))
            yield from _arrow_batches(batches, batch_size)
    except pa.ArrowException as error:
        raise UserError(f"{path}: not an Arrow file that can be read ({error})") from error


_READERS: dict[str, Callable[[Path, int, InputSchema], _Rows]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".pq": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
}

ROW_FILES = frozenset(_READERS)
"""What `row_file_end` says of files that `read_row_batches` reads."""
