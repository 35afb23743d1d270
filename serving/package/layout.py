"""The zip archive of packages and commits, byte by byte: its headers and directory, written and read back.

`FORMAT.md` gives the rules.  They leave nothing open: the file follows from the names and contents
of its records, so reading means building every header again and comparing.  Nothing here knows
what the records are for.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO

from tessera.cpus import usable_cpus
from tessera.serving.package.hashes import ContentHash

TOP_FOLDER = "model"
"""The folder that all records of a package lie in; torch takes any, a package has this one."""

ALIGNMENT_BYTES = 64
"""Every content begins at a multiple of this, as where torch itself writes: tensors are mapped."""

MAX_DIRECTORY_BYTES = 4 << 20
"""A directory beyond this is refused unread: it would name some 60,000 records, a package has hundreds."""

# Records of PKWARE's APPNOTE 6.3, little-endian; names in FORMAT.md.
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_FIELD = struct.Struct("<2H")
_LOCAL_MARK, _ENTRY_MARK, _END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64_MARK, _LOCATOR64_MARK = b"PK\x06\x06", b"PK\x06\x07"
_VERSION = 45  # the first with zip64
_DATE = 0x0021  # 1980-01-01, the earliest
_ZIP64_FIELD = 0x0001
_PADDING_FIELD = 0x4246
_CRC_OFFSET = 14  # in a local header
_THREADS_FROM_BYTES = 64 << 20  # a record's content
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


class LayoutError(ValueError):
    """A file is not laid out as `FORMAT.md` says; the message says where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record of the archive.

    Attributes:
        name: below the top folder.
        bytes: of its content.
        crc32: of its content.
        header_offset: the file's byte at which its local header begins.
        top: the archive's top folder.
    """

    name: str
    bytes: int
    crc32: int
    header_offset: int
    top: str = TOP_FOLDER

    @property
    def content_offset(self) -> int:
        """The file's byte at which its content begins."""
        return self.header_offset + len(local_header(self))

    @property
    def end_offset(self) -> int:
        """The first byte behind its content."""
        return self.content_offset + self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What became of a record's content: size, CRC-32 and the hashes of `ContentHash`."""

    bytes: int
    crc32: int
    sha256: str
    chunks: tuple[str, ...]


def check_name(name: str) -> None:
    """Refuse a name (below the top folder) that a record cannot have.

    Raises:
        LayoutError: it could lead out of the archive, or mean different things to two readers.
    """
    printable = all("!" <= letter <= "~" for letter in name)
    if not printable or "\\" in name or {"", ".", ".."} & set(name.split("/")):
        raise LayoutError(f"record {name!r} has a name that no package uses")


def local_header(entry: Entry) -> bytes:
    """Everything between the end of the record before and this record's content."""
    name = _full_name(entry)
    sizes = min(entry.bytes, _MAX32)
    extra = _zip64_field([entry.bytes] * 2) if entry.bytes >= _MAX32 else b""
    before = entry.header_offset + _LOCAL.size + len(name) + len(extra) + _FIELD.size
    padding = -before % ALIGNMENT_BYTES
    extra += _FIELD.pack(_PADDING_FIELD, padding) + bytes(padding)
    header = _LOCAL.pack(
        _LOCAL_MARK, _VERSION, 0, 0, 0, _DATE, entry.crc32, sizes, sizes, len(name), len(extra)
    )
    return header + name + extra


def directory_and_end(entries: Sequence[Entry]) -> bytes:
    """Everything behind the last content of an archive of ``entries``."""
    directory = b"".join(_directory_entry(entry) for entry in entries)
    offset = entries[-1].end_offset if entries else 0
    return directory + _end(len(entries), len(directory), offset)


def _directory_entry(entry: Entry) -> bytes:
    name, offset = _full_name(entry), entry.header_offset
    large = [entry.bytes] * 2 if entry.bytes >= _MAX32 else []
    large += [offset] if offset >= _MAX32 else []
    extra = _zip64_field(large) if large else b""
    sizes = min(entry.bytes, _MAX32)
    fixed = _ENTRY.pack(
        *(_ENTRY_MARK, _VERSION, _VERSION, 0, 0, 0, _DATE, entry.crc32, sizes, sizes),
        *(len(name), len(extra), 0, 0, 0, 0, min(offset, _MAX32)),
    )
    return fixed + name + extra


def _end(count: int, size: int, offset: int) -> bytes:
    wide = b""
    if count >= _MAX16 or size >= _MAX32 or offset >= _MAX32:
        rest = _END64.size - 12  # behind the mark and this number itself
        wide = _END64.pack(
            _END64_MARK, rest, _VERSION, _VERSION, 0, 0, count, count, size, offset
        ) + _LOCATOR64.pack(_LOCATOR64_MARK, 0, offset + size, 1)
    count, size, offset = min(count, _MAX16), min(size, _MAX32), min(offset, _MAX32)
    return wide + _END.pack(_END_MARK, 0, 0, count, count, size, offset, 0)


def _zip64_field(numbers: list[int]) -> bytes:
    return _FIELD.pack(_ZIP64_FIELD, 8 * len(numbers)) + struct.pack(f"<{len(numbers)}Q", *numbers)


def _full_name(entry: Entry) -> bytes:
    return f"{entry.top}/{entry.name}".encode()


def read_layout(stream: BinaryIO, size: int, top: str = TOP_FOLDER) -> list[Entry]:
    """The records of the archive in ``stream``, of which ``size`` bytes are there.

    Contents are not read.  ``top`` is the top folder that it must have.

    Raises:
        LayoutError: any byte outside the contents is not as this module writes it, or a name
            is none that a package has.
    """
    begin, count, end = _find_directory(stream, size)
    stream.seek(begin)
    entries = _parse_directory(stream.read(end - begin), count, top)
    position = 0
    for entry in entries:
        header = local_header(entry)
        if entry.header_offset == position and position + len(header) <= begin:
            stream.seek(position)
            if stream.read(len(header)) == header:
                position += len(header) + entry.bytes
                continue
        raise LayoutError(f"the header of record {entry.name!r} is not the one it must have")
    stream.seek(begin)
    if position != begin or stream.read() != directory_and_end(entries):
        raise LayoutError("the archive's directory is not the one that its records must have")
    return entries


def _find_directory(stream: BinaryIO, size: int) -> tuple[int, int, int]:
    """Where the directory begins, how many entries it has, and where it ends."""
    if size < _END.size:
        raise LayoutError("too short")
    stream.seek(max(0, size - _END.size - _LOCATOR64.size - _END64.size))
    tail = stream.read()
    mark, _, _, _, count, length, begin, comment = _END.unpack(tail[-_END.size :])
    if mark != _END_MARK or comment:
        raise LayoutError("the archive's end record is not at the file's end")
    end = size - _END.size
    wide = tail[: -_END.size]
    if len(wide) == _END64.size + _LOCATOR64.size and wide[_END64.size :].startswith(
        _LOCATOR64_MARK
    ):
        *_, count, length, begin = _END64.unpack(wide[: _END64.size])
        end -= len(wide)
    if length > MAX_DIRECTORY_BYTES:
        raise LayoutError(f"the archive's directory has {length} bytes")
    if begin + length != end:
        raise LayoutError("the archive's directory is not where its end record says")
    return begin, count, end


def _parse_directory(directory: bytes, count: int, top: str) -> list[Entry]:
    """Names, sizes, CRC-32s and offsets; whoever calls compares the rest by building it again."""
    entries: list[Entry] = []
    seen: set[str] = set()
    at = 0
    while at < len(directory):
        if len(directory) - at < _ENTRY.size:
            raise LayoutError("the archive's directory is cut short")
        (*_, crc32, _, size, name_length, extra_length, _, _, _, _, offset) = _ENTRY.unpack_from(
            directory, at
        )
        at += _ENTRY.size
        name = _short_name(directory[at : at + name_length], top)
        at += name_length
        extra = directory[at + _FIELD.size : at + extra_length]
        at += extra_length
        wide = list(struct.unpack(f"<{len(extra) // 8}Q", extra[: len(extra) // 8 * 8]))
        if size == _MAX32 and len(wide) >= 2:
            size, _, *wide = wide
        if offset == _MAX32 and wide:
            offset = wide[0]
        if name in seen:
            raise LayoutError(f"record {name!r} is there twice")
        seen.add(name)
        entries.append(Entry(name=name, bytes=size, crc32=crc32, header_offset=offset, top=top))
    if len(entries) != count:
        raise LayoutError("the archive's directory has another number of records than it says")
    return entries


def _short_name(full: bytes, top: str) -> str:
    name = full.decode("latin-1")  # takes any byte; check_name does not
    found, _, short = name.partition("/")
    if found != top:
        raise LayoutError(f"record {name!r} has a name that no package uses")
    check_name(short)
    return short


@contextmanager
def _threads(content_bytes: int) -> Iterator[Executor | None]:
    """Threads for a content that is worth them, else None."""
    if content_bytes < _THREADS_FROM_BYTES or usable_cpus() == 1:
        yield None
        return
    with ThreadPoolExecutor(min(usable_cpus() - 1, 3)) as pool:
        yield pool


class ArchiveWriter:
    """Writes an archive record by record; nothing of a content is kept in memory.

    Args:
        stream: opened for writing, positioned behind the last of ``entries``.
        entries: the records that ``stream`` has already.
        top: the archive's top folder.
    """

    def __init__(
        self, stream: BinaryIO, entries: Iterable[Entry] = (), top: str = TOP_FOLDER
    ) -> None:
        self._stream = stream
        self._entries = list(entries)
        self._top = top

    def add(self, name: str, content: Iterable[bytes | memoryview], size: int) -> Written:
        """Append a record.

        Args:
            name: below the top folder; the caller gives the records in `FORMAT.md`'s order.
            content: pieces of bytes, ``size`` in all.
            size: bytes of the content.

        Raises:
            LayoutError: see `check_name`.
        """
        check_name(name)
        offset = self._entries[-1].end_offset if self._entries else 0
        entry = Entry(name=name, bytes=size, crc32=0, header_offset=offset, top=self._top)
        self._stream.write(local_header(entry))
        digest, crc32, written = ContentHash(size), 0, 0
        with _threads(size) as pool:
            for piece in content:
                written += len(piece)
                if pool is None:
                    digest.update(piece)
                    crc32 = zlib.crc32(piece, crc32)
                    self._stream.write(piece)
                    continue
                # Each of the two hashes takes as long as the CRC and the copy to the file together.
                copied = pool.submit(self._stream.write, piece)
                checked = pool.submit(zlib.crc32, piece, crc32)
                digest.update(piece, beside=pool)
                crc32 = checked.result()
                copied.result()
        assert written == size, (name, written, size)
        # Known only now, and the header's other fields do not depend on it.
        self._stream.seek(offset + _CRC_OFFSET)
        self._stream.write(struct.pack("<I", crc32))
        self._stream.seek(0, 2)
        self._entries.append(replace(entry, crc32=crc32))
        return Written(bytes=size, crc32=crc32, sha256=digest.sha256(), chunks=digest.chunks())

    def finish(self) -> None:
        """Write the directory and the end."""
        self._stream.write(directory_and_end(self._entries))
