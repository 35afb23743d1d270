"""Criteo's own files, which have no header: how they are known, and their units as chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tessera.serving.offline.raw_units import Chunk, Kept, Reading, Unit, with_partitions
from tessera.serving.package.schema import InputSchema
from tessera.training.data import criteo_format
from tessera.training.data.criteo_parse import parse_block
from tessera.training.data.table.common import BLOCK_BYTES, DAMAGED, open_bytes, unreadable
from tessera.training.data.table.files import FoundFile

CRITEO_BLOCK_BYTES = 4 << 20
"""Text of a unit; Criteo's parser works in about 15 times the memory of it."""


def looks_like_criteo(file: FoundFile, schema: InputSchema) -> bool:
    """Whether a file has Criteo's columns without a header, for a model of these.

    Its label may be absent, as in Criteo's own test files.
    """
    names = {feature.name for feature in schema.features}
    if schema.dense_features != criteo_format.DENSE_NAMES or names != {*criteo_format.SPARSE_NAMES}:
        return False
    if file.format != "tsv":
        return False
    with ExitStack() as stack:
        text, _ = open_bytes(file, stack)
        try:
            cells = text.readline(BLOCK_BYTES).rstrip(b"\r\n").split(b"\t")
        except DAMAGED as error:
            raise unreadable(file.path, error) from error
    whole = len(cells) in {criteo_format.NUM_COLUMNS, criteo_format.NUM_COLUMNS - 1}
    return whole and not {b"I1", b"C1"} & set(cells)


def criteo_chunks(unit: Unit, reading: Reading) -> Iterator[Chunk]:
    """The rows of a unit of a file in Criteo's own format, as one chunk."""
    assert unit.text is not None
    text = unit.text if unit.text.endswith(b"\n") else unit.text + b"\n"
    columns = text[: text.index(b"\n")].count(b"\t") + 1
    if columns == criteo_format.NUM_COLUMNS - 1:  # without labels, which nobody looks at here
        text = b"0\t" + text[:-1].replace(b"\n", b"\n0\t") + b"\n"
    block = parse_block(text, file=str(unit.file.path), first_line=unit.first_row)
    places = None if block.well_formed is None else np.flatnonzero(block.well_formed)
    words = block.rows
    arrays: dict[str, Any] = {}
    for name, row in zip(criteo_format.DENSE_NAMES, words[criteo_format.DENSE_WORDS], strict=True):
        arrays[name] = pa.array(np.ascontiguousarray(row).view(np.float32))
    present = words[criteo_format.PRESENT_WORD]
    ids = words[criteo_format.SPARSE_WORDS]
    for bit, (name, row) in enumerate(zip(criteo_format.SPARSE_NAMES, ids, strict=True)):
        missing = ((present >> np.uint32(bit)) & 1) == 0
        arrays[name] = pa.array(row.astype(np.int64), mask=missing if missing.any() else None)
    told = {row.line: f"column {row.column!r}: {row.reason}" for row in block.malformed.examples}
    broken = [] if block.well_formed is None else np.flatnonzero(~block.well_formed).tolist()
    odd = [(place, told.get(unit.first_row + place, "is malformed")) for place in broken]
    numbers = np.arange(unit.first_row, unit.first_row + block.lines)
    kept = _kept_of_criteo(text, block.lines, reading.kept)
    yield Chunk(
        rows=block.lines,
        numbers=numbers,
        table=with_partitions(pa.table(arrays), unit.file, reading.names()),
        places=places,
        odd=tuple(odd),
        kept=kept,
    )


def _kept_of_criteo(text: bytes, rows: int, kept: tuple[Kept, ...]) -> Any:
    """The columns that are kept, as strings; null where a line has no such cell or an empty one."""
    if not kept:
        return pa.table({})
    given = text.removesuffix(b"\n").split(b"\n")[:rows]
    lines = pa.array([line.rstrip(b"\r").decode(errors="replace") for line in given], pa.string())
    cells = pc.split_pattern(lines, "\t")
    lengths = pc.list_value_length(cells)
    arrays = []
    for own in kept:
        place = criteo_format.COLUMN_NAMES.index(own.column)
        short = pc.less_equal(lengths, place)
        padded = pc.if_else(short, pa.scalar([""] * (place + 1), cells.type), cells)
        cell = pc.list_element(padded, place)
        arrays.append(pc.if_else(pc.equal(cell, ""), pa.scalar(None, pa.string()), cell))
    return pa.table(arrays, names=[own.name for own in kept])
