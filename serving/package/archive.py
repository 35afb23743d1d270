"""A file of `layout`'s form: which records it has and what they hash to.

Nothing here runs or unpickles anything of the archive, so it is safe on a file from anywhere.
Every byte counts: `tessera.serving.package.layout` compares those around the contents with the only ones
that may be there, the archive's last record names the hash of every content but its own, and its own has
a CRC-32 and, where it is signed, a signature.  Packages (`records`) and commits are such archives.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from tessera.errors import UserError
from tessera.serving.package.archive_parts import Part, parts_of
from tessera.serving.package.hashes import chunk_sizes, in_threads
from tessera.serving.package.layout import (
    Entry,
    LayoutError,
    directory_and_end,
    local_header,
    read_layout,
)
from tessera.serving.package.pace import Pace
from tessera.serving.package.signed_record import RecordInfo

PIECE_BYTES = 64 << 10
"""Stays in a core's cache between being read and being hashed, and is copied at once: whoever waits for the CPU waits for
no longer than that."""
_WORTH_THREADS_BYTES = 2 << 20
_SHOWN_NAMES = 5


class FileIdentity(NamedTuple):
    """Changes whenever a file is replaced or written to; see `file_identity`."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class ArchiveError(UserError):
    """An archive is not used; the message names the file and why."""

    word: ClassVar[str]

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{self.word} {path}: {reason}")
        self.path = path
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class ArchiveKind:
    """What an archive is for.

    Attributes:
        top_folder: that all records lie in.
        last_record: the JSON that lists the others.
        max_last_bytes: its size, at most.
        last_word: what messages call it.
        not_a_file: the message about a path that leads to something else.
        not_laid_out: the message about a file of another layout; ``{error}`` in it says where.
        not_this_kind: the message about an archive without the last record.
        error: what is raised.
    """

    top_folder: str
    last_record: str
    max_last_bytes: int
    last_word: str
    not_a_file: str
    not_laid_out: str
    not_this_kind: str
    error: type[ArchiveError]


class Archive:
    """The records of one archive, by their name below its top folder.

    Attributes:
        kind: what it is for.
        path: the file.
        identity: `file_identity` of what was read; compare it once the file has been used.
        pace: where others are served meanwhile, that of the thread that reads, which then is the only one; None at
            first.

    Raises:
        ArchiveError: the file is missing, is not a regular file, is not an archive, or has a byte
            outside its contents that is not as `FORMAT.md` says.  The error is that of the kind, here and in
            every method.
    """

    kind: ClassVar[ArchiveKind]

    def __init__(self, path: Path) -> None:
        self.path = path
        kind = self.kind
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise kind.error(path, kind.not_a_file)
            self.identity = file_identity(path)
            with path.open("rb") as stream:
                entries = read_layout(stream, status.st_size, kind.top_folder)
        except LayoutError as error:
            raise kind.error(path, kind.not_laid_out.format(error=error)) from error
        except OSError as error:
            raise kind.error(path, f"cannot be read: {error.strerror}") from error
        self.pace: Pace | None = None
        self._listed: Mapping[str, RecordInfo] = {}
        self._last: bytes | None = None
        self._entries = {entry.name: entry for entry in entries}

    @property
    def names(self) -> frozenset[str]:
        """Every record's name."""
        return frozenset(self._entries)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every record, in the order of the file."""
        return tuple(self._entries.values())

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """The content of record ``name``.

        Raises:
            ArchiveError: there is no such record, it is larger than ``max_bytes``, or its
                stored checksum does not hold.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self.kind.error(self.path, f"record {name!r} is missing")
        if entry.bytes > max_bytes:
            raise self.kind.error(
                self.path, f"record {name!r} has {entry.bytes} bytes, more than {max_bytes}"
            )
        try:
            with self.path.open("rb") as stream:
                stream.seek(entry.content_offset)
                content = stream.read(entry.bytes)
        except OSError as error:
            raise self._unreadable(error) from error
        if zlib.crc32(content) != entry.crc32:
            raise self.kind.error(
                self.path, f"record {name!r} is damaged: its CRC-32 does not hold"
            )
        return content

    def last_bytes(self) -> bytes:
        """The content of the last record, which lists the others.

        Raises:
            ArchiveError: it is missing or damaged.
        """
        if self.kind.last_record not in self._entries:
            raise self.kind.error(self.path, self.kind.not_this_kind)
        if self._last is None:  # whoever looks twice sees the same
            self._last = self.read(self.kind.last_record, max_bytes=self.kind.max_last_bytes)
        return self._last

    def check(
        self,
        expected: Mapping[str, RecordInfo],
        *,
        into: Callable[[Entry], memoryview | None] = lambda _: None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Read every content once, in several threads, and compare it with a list.

        Args:
            expected: the list.
            into: memory for a record's content, of its size, if it is to be kept.  It holds what
                was hashed, to be used only once this has returned.
            progress: called with the bytes of each part that has been compared, from several threads.

        Raises:
            ArchiveError: a record is missing, is there without being listed, or differs.
        """
        self.check_headers(expected)
        self.check_some(expected, into=into, progress=progress)

    def check_some(
        self,
        expected: Mapping[str, RecordInfo],
        *,
        into: Callable[[Entry], memoryview | None],
        progress: Callable[[int], None],
    ) -> None:
        """As `check`, of the records of ``expected`` alone; `check_headers` has passed for all."""
        listed = [(entry, expected[entry.name]) for entry in self.entries if entry.name in expected]
        parts = [part for entry, info in listed for part in parts_of(entry, info, into(entry))]

        def check(file: int, part: Part) -> None:
            digest = hashlib.sha256()
            for piece in self._pieces(file, part):
                digest.update(piece)
            self.compare(part, digest.hexdigest())
            progress(part.bytes)

        self.each_part(parts, check)

    def parts(self, name: str) -> list[Part]:
        """The parts of record ``name`` that have hashes of their own; `check_headers` has passed."""
        return parts_of(self._entries[name], self._listed[name], None)

    def each_part(self, parts: Sequence[Part], work: Callable[[int, Part], None]) -> None:
        """Call ``work`` with the file's descriptor and each of ``parts``, begun in their order.

        Several threads call it where there is enough to read and no `pace` is kept to.

        Raises:
            ArchiveError: the file cannot be read.
            Exception: what ``work`` has raised of the first part, in their order, that failed.
        """
        others = self.pace is None and sum(part.bytes for part in parts) >= _WORTH_THREADS_BYTES
        try:
            with self.path.open("rb", buffering=0) as stream:
                file = stream.fileno()
                in_threads([functools.partial(work, file, part) for part in parts], others=others)
        except OSError as error:
            raise self._unreadable(error) from error

    def fill(
        self, file: int, offset: int, place: memoryview, *, step_bytes: int = PIECE_BYTES
    ) -> Iterator[memoryview]:
        """The file's bytes from ``offset`` on, read into ``place`` until it is full.

        Args:
            file: a descriptor of it.
            offset: in the file.
            place: ``[bytes]`` uint8.
            step_bytes: what is read at once, at most; between two of these the `pace` is kept to.

        Yields:
            Each part of ``place`` that has been read, in their order.

        Raises:
            ArchiveError: the file ends before ``place`` is full.
        """
        done = 0
        while done < len(place):
            piece = place[done : done + step_bytes]
            count = os.preadv(file, [piece], offset + done)
            if not count:
                raise self.kind.error(self.path, "became shorter while it was being read")
            yield piece[:count]
            done += count
            if self.pace is not None:
                self.pace.rest()

    def compare(self, part: Part, found: str) -> None:
        """Compare the SHA-256 ``found``, lower-case hex, of what was read as ``part`` with the listed one.

        Raises:
            ArchiveError: it is another one.
        """
        if found != part.sha256:
            raise self.kind.error(
                self.path,
                f"record {part.name!r} was changed: SHA-256 {found} of {part.where}, "
                f"{self.kind.last_word} says {part.sha256}",
            )

    def check_headers(self, expected: Mapping[str, RecordInfo]) -> None:
        """Compare names, sizes and CRC-32s of the headers with a list; no content is read.

        Raises:
            ArchiveError: a record is missing, is there without being listed, or differs.
        """
        self._check_names(expected)
        for entry in self.entries:
            if entry.name not in expected:
                continue
            info = expected[entry.name]
            self._check_sizes(entry, info)
            if entry.crc32 != info.crc32:
                raise self.kind.error(
                    self.path,
                    f"the header of record {entry.name!r} was changed: CRC-32 {entry.crc32:08x}, "
                    f"{self.kind.last_word} says {info.crc32:08x}",
                )
        self._listed = expected

    def read_checked(self, name: str, *, max_bytes: int) -> bytes:
        """The content of record ``name``, compared with its hash; `check_headers` has passed.

        Raises:
            ArchiveError: see `read`; or the content is not the listed one.
        """
        content = self.read(name, max_bytes=max_bytes)
        for part in self.parts(name):
            found = hashlib.sha256(content[part.begin : part.begin + part.bytes]).hexdigest()
            self.compare(part, found)
        return content

    def check_undivided(self) -> None:
        """Compare the hashes that `check` has no need of: of large records as a whole.

        Raises:
            ArchiveError: one differs.
        """
        for entry in self.entries:
            info = self._listed.get(entry.name)
            if info is None or not info.chunks:
                continue
            digest = hashlib.sha256()
            for piece in self.pieces_again(entry):
                digest.update(piece)
            if digest.hexdigest() != info.sha256:
                raise self.kind.error(
                    self.path,
                    f"{self.kind.last_word} is wrong about record {entry.name!r}: its chunks are as listed, "
                    f"and its SHA-256 is {digest.hexdigest()}, listed is {info.sha256}",
                )

    def file_sha256(self, contents: Mapping[str, bytes | memoryview]) -> str:
        """SHA-256 of the whole file as `check` saw it, lower-case hex.

        Args:
            contents: what `check` has kept, by name; anything else is read, and compared, again.

        Raises:
            ArchiveError: what is read is not what it was.
        """
        digest = hashlib.sha256()
        for entry in self.entries:
            digest.update(local_header(entry))
            if entry.name == self.kind.last_record:
                digest.update(self.last_bytes())
            elif entry.name in contents:
                digest.update(contents[entry.name])
            else:
                for piece in self.pieces_again(entry):
                    digest.update(piece)
        digest.update(directory_and_end(self.entries))
        return digest.hexdigest()

    def pieces_again(self, entry: Entry) -> Iterator[memoryview]:
        """A record's content from the file again; each piece is overwritten by the next.

        Raises:
            ArchiveError: it is not what it was when `check` read it.
        """
        try:
            with self.path.open("rb", buffering=0) as stream:
                for part in self.parts(entry.name):
                    digest = hashlib.sha256()
                    for piece in self._pieces(stream.fileno(), part):
                        digest.update(piece)
                        yield piece
                    if digest.hexdigest() != part.sha256:
                        raise self.kind.error(
                            self.path, "was changed while it was being loaded; load it again"
                        )
        except OSError as error:
            raise self._unreadable(error) from error

    def _check_names(self, expected: Mapping[str, RecordInfo]) -> None:
        present = self.names - {self.kind.last_record}
        if missing := sorted(expected.keys() - present):
            raise self.kind.error(self.path, f"records are missing: {_some(missing)}")
        if extra := sorted(present - expected.keys()):
            raise self.kind.error(
                self.path, f"records are not listed in {self.kind.last_word}: {_some(extra)}"
            )
        if list(self._entries) != [*sorted(present), self.kind.last_record]:
            raise self.kind.error(self.path, "the records are not in the order of their names")

    def _check_sizes(self, entry: Entry, listed: RecordInfo) -> None:
        if entry.bytes != listed.bytes:
            raise self.kind.error(
                self.path,
                f"record {entry.name!r} was changed: it has {entry.bytes} bytes, {self.kind.last_word} says "
                f"{listed.bytes}",
            )
        chunks = len(chunk_sizes(entry.bytes))
        if len(listed.chunks) != chunks:
            raise self.kind.error(
                self.path,
                f"the manifest names {len(listed.chunks)} chunks of record {entry.name!r}, whose "
                f"{entry.bytes} bytes have {chunks}",
            )

    def _pieces(self, file: int, part: Part) -> Iterator[memoryview]:
        """A part, piece by piece, in its place or in memory that is used again."""
        if part.place is not None:
            yield from self.fill(file, part.offset, part.place)
            return
        scratch = memoryview(bytearray(min(part.bytes, PIECE_BYTES)))
        for done in range(0, part.bytes, PIECE_BYTES):
            yield from self.fill(file, part.offset + done, scratch[: part.bytes - done])

    def _unreadable(self, error: OSError) -> ArchiveError:
        return self.kind.error(self.path, f"cannot be read: {error.strerror}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"


def file_identity(path: Path) -> FileIdentity:
    """That of the file at ``path``; raises `OSError` where there is none."""
    status = path.stat()
    return FileIdentity(
        device=status.st_dev,
        inode=status.st_ino,
        size=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )
