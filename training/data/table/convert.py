"""Text and Arrow files to Parquet, once, in the folder of prepared files.

Memory: a few blocks of `BLOCK_BYTES`, whatever the size of the file.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from tessera.training.data.malformed import MAX_EXAMPLES, MalformedReport, MalformedRow, Progress
from tessera.training.data.remote import arrow_source, random_access
from tessera.training.data.table.common import (
    BLOCK_BYTES,
    DAMAGED,
    EXPECTED,
    LINE_COLUMN,
    Utf8Text,
    left_out,
    missing_column,
    open_bytes,
    unreadable,
)
from tessera.training.data.table.files import FoundFile
from tessera.training.data.table.jsonl import json_batches, settle_json
from tessera.training.data.table.text import TextColumn

GROUP_ROWS = 1 << 16
PREPARED_FILE = "rows.parquet"
_DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}

Batches = Iterator[tuple[Any, int, MalformedReport]]
"""Record batches, each with the bytes that were read for it and what was left out of it."""


def settle_text(file: FoundFile, columns: list[TextColumn]) -> list[TextColumn]:
    """The columns with what is not known of them yet, seen from the first rows of ``file``.

    Raises:
        UserError: the file cannot be read or lacks a column.
    """
    if file.format == "jsonl":
        return settle_json(file, columns)
    with ExitStack() as stack:
        reader = csv_reader(file, columns, stack, on_bad=lambda _: "skip")
        batch = next_batch(reader, file)
    if batch is None:
        return [dataclasses.replace(c, strings=bool(c.strings), separator="|") for c in columns]
    return [column.settled(batch.column(column.name)) for column in columns]


def convert(
    file: FoundFile, columns: list[TextColumn], names: list[str], folder: Path, progress: Progress
) -> Mapping[str, Any]:
    """Write `PREPARED_FILE` into the empty ``folder``.

    Args:
        file: what is read.
        columns: the columns of a text file, settled.
        names: the columns of any other file.
        folder: where.
        progress: is told what was read, and what was left out so far.

    Returns:
        ``rows``, their number, and ``malformed``, a report's JSON.
    """
    readers: dict[str, Callable[[], Batches]] = {
        "csv": lambda: _csv_batches(file, columns),
        "tsv": lambda: _csv_batches(file, columns),
        "jsonl": lambda: json_batches(file, columns),
        "arrow": lambda: _arrow_batches(file, names),
        "parquet": lambda: _parquet_batches(file, names),
    }
    rows, malformed = 0, MalformedReport()
    writer = None
    waiting: list[Any] = []
    try:
        for batch, source_bytes, report in readers[file.format]():
            malformed += report
            progress(source_bytes, malformed)
            writer = writer or pq.ParquetWriter(
                folder / PREPARED_FILE, batch.schema, compression="lz4", store_schema=True
            )
            rows += batch.num_rows
            waiting.append(batch)
            if sum(part.num_rows for part in waiting) >= GROUP_ROWS or (
                sum(part.nbytes for part in waiting) >= 8 * BLOCK_BYTES
            ):
                writer.write_table(pa.Table.from_batches(waiting), row_group_size=GROUP_ROWS)
                waiting = []
        if waiting and writer is not None:
            writer.write_table(pa.Table.from_batches(waiting), row_group_size=GROUP_ROWS)
    except DAMAGED as error:
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise  # it is the folder that is full
        raise unreadable(file.path, error) from error
    finally:
        if writer is not None:
            writer.close()
    return {"rows": rows, "malformed": malformed.to_json()}


def next_batch(reader: Any, file: FoundFile) -> Any | None:
    """What the reader gives next; None behind the last.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return reader.read_next_batch()
    except StopIteration:
        return None
    except DAMAGED as error:
        raise unreadable(file.path, error) from error


def csv_delimiter(file: FoundFile, header: bytes) -> str:
    """What separates the cells of a file with this first line."""
    return max(_DELIMITERS[file.format], key=lambda sign: header.count(sign.encode()))


def csv_names(header: bytes, delimiter: str) -> list[str]:
    """The columns that the first line of a file names.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        pa.ArrowInvalid: it is empty, has no end, or is not a line of CSV.
    """
    if len(header) == BLOCK_BYTES and not header.endswith(b"\n"):
        raise pa.ArrowInvalid(f"its first line does not end within {BLOCK_BYTES} bytes")
    try:
        names = next(csv.reader([header.decode("utf-8-sig")], delimiter=delimiter), [])
    except csv.Error as error:
        raise pa.ArrowInvalid(f"its first line is not one of CSV: {error}") from error
    if not names:
        raise pa.ArrowInvalid("Empty CSV file")
    return names


def csv_null_values() -> list[str]:
    """What stands for a missing value in CSV, unless it is quoted."""
    return ["", "NULL", "null", "NA", "N/A", "NaN", "nan", "None"]


def csv_reader(
    file: FoundFile, columns: list[TextColumn], stack: ExitStack, on_bad: Callable[[Any], str]
) -> Any:
    """A streaming reader of the columns' cells as strings, closed with ``stack``.

    ``on_bad`` is given each row with another number of cells than the header.

    Raises:
        UserError: the file cannot be read or lacks a column.
    """
    text, _ = open_bytes(file, stack)
    try:
        header = text.readline(BLOCK_BYTES)
        text.seek(0)
        delimiter = csv_delimiter(file, header)
        there = csv_names(header, delimiter)
    except DAMAGED as error:
        raise unreadable(file.path, error) from error
    names = list(dict.fromkeys(column.name for column in columns))
    # Before pyarrow looks for them: its threads go on reading the file after it has raised.
    for name in names:
        if name not in there:
            raise missing_column(file.path, name, there)
    try:
        return pa_csv.open_csv(
            Utf8Text(text),
            read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            parse_options=pa_csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=on_bad
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types={name: pa.string() for name in names},
                include_columns=names,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                null_values=csv_null_values(),
            ),
        )
    except DAMAGED as error:
        raise unreadable(file.path, error) from error


def _csv_batches(file: FoundFile, columns: list[TextColumn]) -> Batches:
    skipped: list[int] = []
    report = MalformedReport()

    def on_bad(row: Any) -> str:
        nonlocal report
        skipped.append(row.number or 0)
        reason = f"expected {row.expected_columns} columns"
        report += left_out(
            file.path, row.number or 0, "line", f"{row.actual_columns} columns", reason
        )
        return "skip"

    with ExitStack() as stack:
        reader = csv_reader(file, columns, stack, on_bad)
        told, first = 0, 2  # the header is row 1
        size = file.path.stat().st_size
        while (batch := next_batch(reader, file)) is not None:
            numbers = _row_numbers(first, batch.num_rows, skipped)
            first = numbers[-1] + 1 if numbers else first
            arrays = {column.name: batch.column(column.name) for column in columns}
            typed, more = _typed(file, columns, arrays, numbers)
            step = min(BLOCK_BYTES, size - told)
            told += step
            yield typed, step, report + more
            report = MalformedReport()


def _row_numbers(first: int, count: int, skipped: list[int]) -> list[int]:
    """The numbers of ``count`` rows from ``first`` on, without those that were skipped."""
    lost = {number for number in skipped if number >= first}
    numbers = (number for number in itertools.count(first) if number not in lost)
    return list(itertools.islice(numbers, count))


def _typed(
    file: FoundFile, columns: list[TextColumn], text: dict[str, Any], numbers: list[int]
) -> tuple[Any, MalformedReport]:
    """The rows that can be read, with columns of their types, and a report on the others."""
    arrays, bad, reasons = [], None, []
    for column in columns:
        array, wrong = column.read(text[column.name])
        arrays.append(array)
        if wrong is not None and pc.any(wrong).as_py():
            reasons.append((column, wrong))
            bad = wrong if bad is None else pc.or_(bad, wrong)
    names = [*(column.name for column in columns), LINE_COLUMN]
    batch = pa.RecordBatch.from_arrays([*arrays, pa.array(numbers, pa.int64())], names=names)
    if bad is None:
        return batch, MalformedReport()
    report = MalformedReport(pc.sum(bad).as_py())
    examples: list[MalformedRow] = []
    for row in pc.indices_nonzero(bad)[:MAX_EXAMPLES].to_pylist():
        column = next(column for column, wrong in reasons if wrong[row].as_py())
        value = str(text[column.name][row].as_py())
        reason = f"expected {EXPECTED[column.holds]}"
        examples += left_out(file.path, numbers[row], column.name, value, reason).examples
    return batch.filter(pc.invert(bad)), dataclasses.replace(report, examples=tuple(examples))


def _arrow_batches(file: FoundFile, names: list[str]) -> Batches:
    with ExitStack() as stack:
        source = stack.enter_context(random_access(file.path))
        try:
            reader = pa.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            batches = iter(reader := pa.ipc.open_stream(source))
        there = reader.schema.names
        for name in names:
            if name not in there:
                raise missing_column(file.path, name, there)
        told = 0
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would lead anywhere in memory
            now = source.tell()
            yield batch.select(names), max(0, now - told), MalformedReport()
            told = max(told, now)


def _parquet_batches(file: FoundFile, names: list[str]) -> Batches:
    with pq.ParquetFile(arrow_source(file.path)) as found:
        total = max(1, found.metadata.num_rows)
        size = file.path.stat().st_size
        for batch in found.iter_batches(GROUP_ROWS, columns=names, use_threads=False):
            yield batch, size * batch.num_rows // total, MalformedReport()
