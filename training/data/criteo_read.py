"""Criteo files of any size to prepared rows, by several processes, in the order of the text.

Plain files are cut into ranges of `TASK_BYTES`; a line belongs to the range that its first byte is
in, and a worker finds the lines of its range by itself.  A ``.gz`` file has one reader here that
decompresses and hands whole lines to the workers.  Results come back in order, at most
``2 * workers`` tasks are under way, and each worker parses `TILE_BYTES` at a time, so memory is
bounded whatever the files' size:

    this process      2 * workers * TASK_BYTES * r     results, or decompressed text, under way
    each worker       2 * TASK_BYTES * r + TILE_BYTES * t

where a prepared row's 164 bytes and the parser's scratch make r = 0.7 and t = 15 for Criteo's own
lines (about 240 bytes), and at most r = 4 and t = 90 for the shortest possible ones (40 bytes).
With 8 MiB tasks, 512 KiB tiles and 2 workers that is about 25 MiB here and 20 MiB in each worker
for Criteo's own lines, on top of what the workers, which are forked, share with this process.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tessera.errors import UserError
from tessera.partitions import EachTask, LocalEngine
from tessera.training.data.criteo_format import ROW_WORDS
from tessera.training.data.criteo_parse import ParsedBlock, parse_block
from tessera.training.data.malformed import MalformedReport

TASK_BYTES = 8 << 20
TILE_BYTES = 512 << 10
SERIAL_BYTES = 128 << 20
"""So much text is parsed here before other processes have begun (about 0.3 s)."""
MAX_LINE_BYTES = 64 << 10
"""A longer line (a whole one has under 600 bytes) is cut, which leaves it malformed."""

_CUT_LINE_BYTES = 1024


@dataclass(frozen=True)
class Part:
    """Neighbouring lines of one file.

    Attributes:
        rows: ``[41, n]`` uint32, prepared rows as `criteo_format` describes.
        malformed: lines that were left out.
        source_bytes: how many bytes of the file, as it lies on disk, these lines took.
    """

    rows: npt.NDArray[np.uint32]
    malformed: MalformedReport
    source_bytes: int


@dataclass(frozen=True)
class _Task:
    """Lines to parse: ``text``, or where there is none the range of the file."""

    file: str
    start: int
    stop: int
    text: bytes | None
    source_bytes: int
    ends_file: bool


def read_criteo(files: Iterable[Path], *, workers: int = 0) -> Iterator[Part]:
    """The rows of ``files``, one file after the other, each from its first line.

    Closing the iterator ends the workers.

    Args:
        files: Criteo's text; a name ending in ``.gz`` says that it is compressed.
        workers: parsing processes; below 2, or for less than `SERIAL_BYTES` in all, none but
            this one.

    Raises:
        UserError: a file is not there, is not readable, or is not whole gzip.
    """
    files = list(files)
    if sum(_size(file) for file in files) <= SERIAL_BYTES:
        workers = 0
    line = 0
    tasks = (
        task
        for file in files
        for task in (_gzip_tasks(file) if file.suffix == ".gz" else _plain_tasks(file))
    )
    engine = LocalEngine(processes=workers)
    for task, result in engine.map(EachTask(_parse), tasks):
        examples = tuple(replace(row, line=row.line + line) for row in result.malformed.examples)
        line = 0 if task.ends_file else line + result.lines
        yield Part(
            result.rows, MalformedReport(result.malformed.total, examples), task.source_bytes
        )


def _size(file: Path) -> int:
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise UserError(f"path={str(file)!r}: no such file that may be read; name one")
    return file.stat().st_size


def _plain_tasks(file: Path) -> Iterator[_Task]:
    size = _size(file)
    for start in range(0, size, TASK_BYTES):
        stop = min(start + TASK_BYTES, size)
        yield _Task(str(file), start, stop, None, stop - start, stop == size)


def _gzip_tasks(file: Path) -> Iterator[_Task]:
    """Whole lines of decompressed text; the last task of the file may be empty."""
    read_before = 0
    try:
        with file.open("rb") as raw, gzip.open(raw) as text:
            carry = b""
            while True:
                piece = text.read(TASK_BYTES)
                lines, carry = _whole_lines(carry, piece)
                compressed = raw.tell() - read_before
                read_before += compressed
                if not piece:
                    yield _Task(str(file), 0, 0, lines + carry, compressed, ends_file=True)
                    return
                yield _Task(str(file), 0, 0, lines, compressed, ends_file=False)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"path={str(file)!r}: not a whole gzip file ({error}); fetch or compress it again"
        ) from error


def _whole_lines(carry: bytes, piece: bytes) -> tuple[bytes, bytes]:
    """``carry + piece`` as (lines that end, the beginning of one that does not).

    The beginning of a line that is too long is cut to `_CUT_LINE_BYTES`; it stays too long to
    be well-formed, so it is reported as malformed.
    """
    newline = piece.rfind(b"\n") + 1
    if newline:
        lines, carry = carry + piece[:newline], piece[newline:]
    else:
        lines, carry = b"", carry + piece
    return lines, carry if len(carry) <= MAX_LINE_BYTES else carry[:_CUT_LINE_BYTES]


def _parse(task: _Task) -> ParsedBlock:
    """Parse a task, a tile at a time, lines counted from 1 within it; runs in a worker."""
    parts: list[npt.NDArray[np.uint32]] = []
    malformed = MalformedReport()
    lines = 0
    for tile in _tiles(task):
        block = parse_block(tile, file=task.file, first_line=lines + 1)
        parts.append(block.rows)
        lines += block.lines
        malformed += block.malformed
    rows = np.concatenate(parts, axis=1) if parts else np.empty((ROW_WORDS, 0), np.uint32)
    return ParsedBlock(rows, lines, malformed)


def _tiles(task: _Task) -> Iterator[bytes]:
    """The task's lines as pieces of about `TILE_BYTES`, each of whole lines."""
    carry = b""
    text = task.text
    pieces = (
        _range_pieces(task)
        if text is None
        else (text[start : start + TILE_BYTES] for start in range(0, len(text), TILE_BYTES))
    )
    for piece in pieces:
        lines, carry = _whole_lines(carry, piece)
        if lines:
            yield lines
    if carry:
        yield carry


def _range_pieces(task: _Task) -> Iterator[bytes]:
    """The bytes of the lines whose first byte is in the task's range of its file."""
    with Path(task.file).open("rb") as file:
        # A line begins in the range if the newline before it is in [start - 1, stop - 1).
        place = max(task.start - 1, 0)
        file.seek(place)
        inside = task.start == 0
        while place < task.stop - 1:
            piece = file.read(min(TILE_BYTES, task.stop - 1 - place))
            if not piece:
                return
            place += len(piece)
            if not inside:
                newline = piece.find(b"\n") + 1
                if not newline:
                    continue
                inside, piece = True, piece[newline:]
            yield piece
        # The range's last line ends with the first newline from stop - 1 on.
        while inside and (piece := file.read(4096)):
            newline = piece.find(b"\n") + 1
            yield piece[:newline] if newline else piece
            inside = not newline
