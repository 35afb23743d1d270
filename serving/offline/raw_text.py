"""Files to units and these to chunks of typed columns; of text, blocks of rows are units.

Shapes: ``n`` rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tessera.errors import UserError
from tessera.serving.client.row_files import cell_readers
from tessera.serving.offline.raw_columns import column_names, text_columns_of
from tessera.serving.offline.raw_criteo import CRITEO_BLOCK_BYTES, criteo_chunks
from tessera.serving.offline.raw_units import (
    TEXT_FORMATS,
    Chunk,
    Kept,
    Reading,
    Unit,
    kept_columns,
    partitions_of,
    typed_chunks,
    typed_units,
    with_partitions,
)
from tessera.serving.package.schema import InputSchema
from tessera.training.data.table.common import (
    BLOCK_BYTES,
    DAMAGED,
    LINE_COLUMN,
    open_bytes,
    unreadable,
)
from tessera.training.data.table.convert import csv_reader, next_batch, settle_text
from tessera.training.data.table.files import FoundFile
from tessera.training.data.table.jsonl import read_block, settle_json
from tessera.training.data.table.text import TextColumn

_FEW_LINES = 32
_NOT_JSON = "expected a JSON object"


def found_separators(file: FoundFile, schema: InputSchema) -> dict[str, str]:
    """By column of lists, what stands between its items in the first rows of a CSV file."""
    lists = [c for c in text_columns_of(schema, file.partitions) if c.many]
    if not lists:
        return {}
    return {column.name: column.separator or "|" for column in settle_text(file, lists)}


def units_of(files: Iterable[FoundFile], reading: Reading) -> Iterator[Unit]:
    """The units of all files, numbered from 0.

    Raises:
        UserError: a file is damaged or lacks a column.
    """
    number = 0
    for file in files:
        text = file.format in TEXT_FORMATS
        for unit in text_units(file, reading, number) if text else typed_units(file, number):
            yield unit
            number = unit.number + 1


def chunks_of(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    """The rows of a unit of any format.

    Raises:
        UserError: the file is damaged or lacks a column.
    """
    text = unit.file.format in TEXT_FORMATS
    return text_chunks(unit, reading) if text else typed_chunks(unit, reading)


def text_units(file: FoundFile, reading: Reading, first: int) -> Iterator[Unit]:
    """The units of a file of text, numbered from ``first``.

    Raises:
        UserError: the file is damaged or lacks a column.
    """
    if file.format == "jsonl" or reading.criteo:
        if not reading.criteo:
            # A row may lack a column, whose value is then missing; a file may not.
            names = [name for name in reading.names() if name not in file.partitions]
            settle_json(file, [TextColumn(name=name, holds="id") for name in names])
        return _line_units(file, first, CRITEO_BLOCK_BYTES if reading.criteo else BLOCK_BYTES)
    return _csv_units(file, reading, first)


def text_chunks(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    """The rows of a unit that `text_units` gave, as one chunk or more."""
    if reading.criteo:
        return criteo_chunks(unit, reading)
    return (_json_chunks if unit.file.format == "jsonl" else _csv_chunks)(unit, reading)


def _line_units(file: FoundFile, first: int, block_bytes: int) -> Iterator[Unit]:
    line, told, number = 1, 0, first
    with ExitStack() as stack:
        text, raw = open_bytes(file, stack)
        while True:
            try:
                block = text.read(block_bytes)
                block += text.readline() if block else b""
            except DAMAGED as error:
                raise unreadable(file.path, error) from error
            if not block:
                return
            now = raw.tell()
            yield Unit(
                number=number, file=file, text=block, first_row=line, source_bytes=now - told
            )
            line += block.count(b"\n")
            told = now
            number += 1


# CSV


def _csv_units(file: FoundFile, reading: Reading, first: int) -> Iterator[Unit]:
    there = [name for name in reading.names() if name not in file.partitions]
    broken: list[tuple[int, str]] = []

    def on_bad(row: Any) -> str:
        reason = f"the row has {row.actual_columns} cells, the header {row.expected_columns}"
        broken.append((row.number, reason))
        return "skip"

    size, told, number, row = file.path.stat().st_size, 0, first, 2  # the header is row 1
    with ExitStack() as stack:
        columns = [TextColumn(name=name, holds="id", strings=True) for name in there]
        reader = csv_reader(file, columns, stack, on_bad)
        while True:
            batch = next_batch(reader, file)
            rows = 0 if batch is None else batch.num_rows
            # The reader may have seen rows that only the next batch is around.
            own = _within(broken, row, rows, to_end=batch is None)
            if not rows and not own:
                if batch is None:
                    return
                continue
            step = size - told if batch is None else min(BLOCK_BYTES, size - told)
            told += step
            yield Unit(
                number=number,
                file=file,
                text=_as_bytes(batch),
                broken=tuple((place - row, reason) for place, reason in own),
                first_row=row,
                source_bytes=step,
            )
            row += rows + len(own)
            number += 1
            broken = broken[len(own) :]


def _within(
    broken: list[tuple[int, str]], first: int, rows: int, *, to_end: bool
) -> list[tuple[int, str]]:
    """The broken rows that stand before the last of ``rows`` whole ones, from row ``first`` on."""
    if to_end:
        return list(broken)
    own = 0
    while own < len(broken) and broken[own][0] < first + rows + own:
        own += 1
    return broken[:own]


def _as_bytes(batch: Any | None) -> bytes:
    if batch is None:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _csv_chunks(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    names = reading.names()
    stored = [name for name in names if name not in unit.file.partitions]
    if unit.text:
        text = pa.ipc.open_stream(unit.text).read_all().combine_chunks()
    else:
        text = pa.table({name: pa.array([], pa.string()) for name in stored})
    rows = text.num_rows + len(unit.broken)
    whole = np.ones(rows, np.bool_)
    whole[[place for place, _ in unit.broken]] = False
    places = np.flatnonzero(whole)
    kept = kept_columns(with_partitions(text, unit.file, names), reading.kept)
    if len(places) < rows:
        at = np.full(rows, -1, np.int64)
        at[places] = np.arange(len(places))
        kept = kept.take(pa.array(at, mask=at < 0))
    numbers = np.arange(unit.first_row, unit.first_row + rows)
    table, odd = _typed(text, unit, reading)
    bad = np.array([place for place, _ in odd], np.int64)
    typed_places = np.delete(places, bad) if len(bad) else places
    yield Chunk(
        rows=rows,
        numbers=numbers,
        table=with_partitions(table, unit.file, names),
        places=typed_places,
        odd=(*unit.broken, *((int(places[place]), row) for place, row in odd)),
        kept=kept,
    )


def _typed(text: Any, unit: Unit, reading: Reading) -> tuple[Any, list[tuple[int, dict[str, Any]]]]:
    """The rows whose cells have their columns' types, and the others by their places."""
    columns = text_columns_of(reading.schema, unit.file.partitions)
    # A text of digits alone may be hexadecimal, which the rules for single rows know.
    hexadecimal = any(feature.hex for feature in reading.schema.features)
    wrong = np.full(text.num_rows, hexadecimal, np.bool_)
    arrays = []
    for column in columns:
        if column.many and not column.weighted:
            column = _separated(column, reading)  # noqa: PLW2901 - the same with its separator
        if column.weighted:
            raise UserError(
                f"{unit.file.path}: column {column.name!r} is one of ids with weights, which CSV cannot"
                " hold; give JSON lines, Parquet or Arrow"
            )
        cells = text.column(column.name)
        cells = cells.chunk(0) if cells.num_chunks == 1 else cells.combine_chunks()
        array, bad = column.read(cells)
        arrays.append(array)
        if bad is not None:
            wrong |= pc.fill_null(bad, False).to_numpy(zero_copy_only=False)
    table = pa.table(arrays, names=[column.name for column in columns])
    if not wrong.any():
        return table, []
    readers = cell_readers(reading.schema, whole_dense=False)
    fixed = _model_partitions(unit, reading)
    odd = []
    names = [column.name for column in columns]
    for place in np.flatnonzero(wrong).tolist():
        cells = {name: text.column(name)[place].as_py() for name in names}
        row = {n: None if cell is None else readers[n](cell) for n, cell in cells.items()}
        odd.append((place, {**row, **fixed}))
    return table.filter(pa.array(~wrong)), odd


def _separated(column: TextColumn, reading: Reading) -> TextColumn:
    return TextColumn(
        name=column.name,
        holds=column.holds,
        many=True,
        strings=column.strings,
        separator=reading.separators.get(column.name, "|"),
    )


def _model_partitions(unit: Unit, reading: Reading) -> dict[str, Any]:
    wanted = set(column_names(reading.schema))
    return {name: value for name, value in partitions_of(unit.file).items() if name in wanted}


# JSON lines


def _json_chunks(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    assert unit.text is not None
    lines = unit.text.splitlines()
    columns = text_columns_of(reading.schema, unit.file.partitions)
    numbered = [(number, line) for number, line in enumerate(lines, unit.first_row) if line.strip()]
    yield from _json_pieces(numbered, columns, unit, reading)


def _json_pieces(
    lines: list[tuple[int, bytes]], columns: list[TextColumn], unit: Unit, reading: Reading
) -> Iterator[Chunk]:
    """Lines as a whole where all is well; otherwise halves of them, down to a few lines one by one."""
    if not lines:
        return
    own = [line for _, line in lines]
    table = read_block(own, b"\n".join(own) + b"\n", 1, columns)
    numbers = np.array([number for number, _ in lines], np.int64)
    names = reading.names()
    if table is not None:
        table = pa.Table.from_batches([table]).drop_columns([LINE_COLUMN])
        table = with_partitions(table, unit.file, names)
        kept = _kept_of_json(own, unit, reading.kept)
        yield Chunk(rows=len(lines), numbers=numbers, table=table, kept=kept)
        return
    if len(lines) > _FEW_LINES and not any(column.weighted for column in columns):
        middle = len(lines) // 2
        yield from _json_pieces(lines[:middle], columns, unit, reading)
        yield from _json_pieces(lines[middle:], columns, unit, reading)
        return
    fixed = _model_partitions(unit, reading)
    odd: list[tuple[int, dict[str, Any] | str]] = []
    for place, line in enumerate(own):
        row = _object(line)
        if row is None:
            odd.append((place, _NOT_JSON))
        else:
            known = {column.name: row.get(column.name) for column in columns}
            odd.append((place, {**known, **fixed}))
    kept = _kept_of_json(own, unit, reading.kept)
    yield Chunk(rows=len(lines), numbers=numbers, table=None, odd=tuple(odd), kept=kept)


def _object(line: bytes) -> Mapping[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _kept_of_json(lines: list[bytes], unit: Unit, kept: tuple[Kept, ...]) -> Any:
    """The columns that are kept, as strings: those of JSON as they are, other values as JSON."""
    if not kept:
        return pa.table({})
    fixed = partitions_of(unit.file)
    rows = [_object(line) or {} for line in lines]
    arrays = []
    for own in kept:
        if own.column in fixed:
            value = fixed[own.column]
            kind = pa.string() if isinstance(value, str) else pa.int64()
            arrays.append(pa.repeat(pa.scalar(value, kind), len(lines)))
            continue
        cells = (row.get(own.column) for row in rows)
        arrays.append(pa.array([_as_text(cell) for cell in cells], pa.string()))
    return pa.table(arrays, names=[own.name for own in kept])


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()  # a lone surrogate is not a string
