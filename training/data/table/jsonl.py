"""JSON lines to record batches: a block at a time where all is well, line by line where it is not."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.json as pa_json

from tessera.training.data.malformed import MalformedReport
from tessera.training.data.table.common import (
    BLOCK_BYTES,
    DAMAGED,
    EXPECTED,
    LINE_COLUMN,
    left_out,
    missing_column,
    open_bytes,
    unreadable,
)
from tessera.training.data.table.files import FoundFile
from tessera.training.data.table.text import TextColumn

_SNIFFED_BYTES = 1 << 20
_LARGEST_ID = 1 << 63


def settle_json(file: FoundFile, columns: list[TextColumn]) -> list[TextColumn]:
    """The columns with what is not known of them yet, seen from the first lines of ``file``.

    Raises:
        UserError: the file cannot be read or no line has a column.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        text, _ = open_bytes(file, stack)
        try:
            lines = text.readlines(_SNIFFED_BYTES)
        except DAMAGED as error:
            raise unreadable(file.path, error) from error
    for line in lines:
        row = _parsed(line)
        if isinstance(row, dict):
            rows.append(row)
    there = list(dict.fromkeys(name for row in rows for name in row))
    for column in columns:
        if rows and column.name not in there:
            raise missing_column(file.path, column.name, there)
    return [_settled(column, [row.get(column.name) for row in rows]) for column in columns]


def _settled(column: TextColumn, cells: list[Any]) -> TextColumn:
    items = [
        item
        for cell in cells
        for item in (cell if isinstance(cell, (list, dict)) else [cell])
        if item is not None
    ]
    strings = column.strings
    if strings is None:
        strings = any(isinstance(item, str) for item in items)
    return TextColumn(
        name=column.name,
        holds=column.holds,
        many=column.many,
        weighted=column.weighted,
        strings=strings,
        separator="",
    )


def json_batches(
    file: FoundFile, columns: list[TextColumn]
) -> Iterator[tuple[Any, int, MalformedReport]]:
    """The rows of a file of JSON lines; see `tessera.training.data.table.convert.Batches`."""
    with ExitStack() as stack:
        text, raw = open_bytes(file, stack)
        first, told = 1, 0
        while block := text.read(BLOCK_BYTES):
            block += text.readline()
            lines = block.splitlines()
            batch, report = read_block(lines, block, first, columns), MalformedReport()
            if batch is None:
                batch, report = _by_line(file, lines, first, columns)
            first += len(lines)
            now = raw.tell()
            yield batch, now - told, report
            told = now


def _schema(columns: list[TextColumn]) -> Any:
    """The columns' types, without that of the rows' numbers."""
    return pa.schema([(column.name, column.type) for column in columns])


def _numbered(batch: Any, numbers: list[int]) -> Any:
    """The batch with its rows' numbers as a last column."""
    arrays = [*batch.columns, pa.array(numbers, pa.int64())]
    return pa.RecordBatch.from_arrays(arrays, names=[*batch.schema.names, LINE_COLUMN])


def read_block(
    lines: list[bytes], block: bytes, first: int, columns: list[TextColumn]
) -> Any | None:
    """The block read as a whole; None where anything in it is not as it should be.

    ``lines`` are its lines, and ``first`` the number of the first, for `LINE_COLUMN`.
    """
    if any(column.weighted for column in columns):
        return None  # a JSON object is not a map to Arrow's reader
    try:
        table = pa_json.read_json(
            io.BytesIO(block),
            read_options=pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            parse_options=pa_json.ParseOptions(
                explicit_schema=_schema(columns), unexpected_field_behavior="ignore"
            ),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    numbers = [number for number, line in enumerate(lines, first) if line.strip()]
    if table.num_rows != len(numbers) or not numbers:
        return None  # an object over several lines, or several in one
    return _numbered(table.combine_chunks().to_batches()[0], numbers)


def _by_line(
    file: FoundFile, lines: list[bytes], first: int, columns: list[TextColumn]
) -> tuple[Any, MalformedReport]:
    report = MalformedReport()
    cells: list[list[Any]] = [[] for _ in columns]
    numbers: list[int] = []
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        row = _parsed(line)
        if not isinstance(row, dict):
            shown = line[:100].decode(errors="backslashreplace")
            report += left_out(file.path, number, "line", shown, "expected a JSON object")
            continue
        values = []
        for column in columns:
            try:
                values.append(_cell(column, row.get(column.name)))
            except (TypeError, ValueError, OverflowError, pa.ArrowException):  # noqa: PERF203 - the slow way
                reason = f"expected {EXPECTED[column.holds]}"
                reason += "s in a list" if column.many else ""
                value = row.get(column.name)
                report += left_out(file.path, number, column.name, value, reason)
                break
        else:
            numbers.append(number)
            for place, value in zip(cells, values, strict=True):
                place.append(value)
    arrays = [pa.array(values, column.type) for column, values in zip(columns, cells, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=_schema(columns))
    return _numbered(batch, numbers), report


def _parsed(line: bytes) -> Any:
    """The value of a line, or None where it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _cell(column: TextColumn, value: Any) -> Any:
    """A JSON value as pyarrow takes it for the column's type.

    Raises:
        TypeError, ValueError, OverflowError, ArrowException: it is not of the type.
    """
    if value is None:
        return None
    if column.weighted:
        return [(_item(column, _key(column, key)), float(w)) for key, w in dict(value).items()]
    if column.many:
        if not isinstance(value, list):
            raise TypeError(value)
        return [None if item is None else _item(column, item) for item in value]
    return _item(column, value)


def _key(column: TextColumn, key: str) -> Any:
    return key if column.strings else int(key)


def _item(column: TextColumn, value: Any) -> Any:
    if column.holds == "number":
        if not isinstance(value, (int, float)):
            raise TypeError(value)
        return float(value)
    if column.strings:
        if not isinstance(value, str):
            raise TypeError(value)
        value.encode()  # a lone surrogate is not a string
        return value if column.holds == "id" else pa.scalar(value.rstrip("Z")).cast(column.type)
    if not isinstance(value, (int, float)) or value != int(value):
        raise TypeError(value)
    if not -_LARGEST_ID <= int(value) < _LARGEST_ID:
        raise OverflowError(value)
    return int(value)
