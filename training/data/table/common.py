"""What the readers of all kinds of files share: bytes of text, and one line for each trouble."""

from __future__ import annotations

import atexit
import codecs
import difflib
import gc
import gzip
import io
import time
import weakref
import zlib
from contextlib import ExitStack
from typing import Any, BinaryIO, cast

import pyarrow as pa

from tessera.errors import UserError
from tessera.training.data.malformed import MalformedReport, MalformedRow
from tessera.training.data.remote import Location, RemoteFile, remote_error
from tessera.training.data.table.files import FoundFile

BLOCK_BYTES = 8 << 20
"""How much text is read at once."""

EXPECTED = {"number": "a number", "id": "an integer id", "time": "a point in time"}
"""What a cell must be, by what its column holds."""

LINE_COLUMN = "tessera.line"
"""In files that were converted from text: the number of the row in the text."""

DAMAGED = (pa.ArrowException, gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError, OSError)
"""What readers raise where a file is not what its name says."""

_READERS_END_S = 10.0
"""What the threads that read ahead may take at the end of the program."""
_LOOK_S = 0.01

_LONGEST_SHOWN = 60
_MOST_SHOWN = 20


def open_bytes(file: FoundFile, stack: ExitStack) -> tuple[BinaryIO, BinaryIO]:
    """The file as bytes of text, and as it lies on the disk, whose place tells the progress."""
    raw = stack.enter_context(file.path.open("rb"))
    if file.path.name.lower().endswith(".gz"):
        return cast("BinaryIO", stack.enter_context(gzip.GzipFile(fileobj=raw))), raw
    return raw, raw


class Utf8Text(io.RawIOBase):
    """A file of text from where it stands, whose bytes are seen to be UTF-8 as they are read.

    pyarrow's reader of CSV decodes rows that it skips where no error can leave it, so that the bytes
    must be good before.  ``read`` raises `UnicodeDecodeError` where they are not.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        _texts.add(self)

    def readable(self) -> bool:
        """See `io.IOBase`."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """See `io.RawIOBase`."""
        block = self._file.read(size)
        if size != 0:
            self._decoder.decode(block, final=not block)
        return block


_texts: weakref.WeakSet[Utf8Text] = weakref.WeakSet()


@atexit.register
def _wait_for_readers() -> None:
    """Let pyarrow's threads end what they read ahead of rows that nobody wants any more.

    They hold the file until then, and Python ends the whole process by SIGABRT if one of them comes back to it
    while the interpreter ends.
    """
    if _texts:
        gc.collect()
    until = time.monotonic() + _READERS_END_S
    while _texts and time.monotonic() < until:
        time.sleep(_LOOK_S)


def unreadable(path: Location, error: Exception) -> UserError:
    """The error that says that a file is damaged, not of its format, or out of reach."""
    if isinstance(path, RemoteFile):
        return remote_error(path.url, error)
    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return UserError(f"{path}: cannot be read: {reason}; mend the file or leave it out")


def missing_column(path: Location, name: str, there: list[str]) -> UserError:
    """The error that says that a file lacks a column."""
    near = difflib.get_close_matches(name, there[:10_000], n=1, cutoff=0.5)
    more = ", ..." if len(there) > _MOST_SHOWN else ""
    shown = [one if len(one) <= _LONGEST_SHOWN else f"{one[:_LONGEST_SHOWN]}..." for one in there]
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(shown[:_MOST_SHOWN])}{more}"
    return UserError(f"{path}: has no column {name!r}; {hint}")


def left_out(file: Location, row: int, column: str, value: Any, reason: str) -> MalformedReport:
    """A report of one row that cannot be read."""
    text = str(value)
    shown = text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "..."
    found = MalformedRow(file=str(file), line=row, column=column, value=shown, reason=reason)
    return MalformedReport(1, (found,))
