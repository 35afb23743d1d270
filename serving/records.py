"""The package file as a plain archive: which records it has and what they hash to.

Nothing here runs or unpickles anything of the archive, so it is safe on a file from anywhere.
Every byte counts: `tessera.serving.layout` compares those around the contents with the only ones
that may be there, the manifest names the hash of every content but its own, and its own has a CRC-32
and, where it is signed, a signature.
"""

from __future__ import annotations

import hashlib
import stat
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.layout import (
    Entry,
    LayoutError,
    directory_and_end,
    local_header,
    read_layout,
)
from tessera.serving.manifest import MANIFEST_RECORD, Manifest, RecordInfo

_CHUNK_BYTES = 4 << 20
_SCRATCH_PIECES = 4
_MAX_MANIFEST_BYTES = 256 << 20
_WORTH_A_THREAD_BYTES = 1 << 20


class PackageError(UserError):
    """A package is not served; the message names the file and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"package {path}: {reason}")
        self.path = path
        self.reason = reason


class Records:
    """The records of one archive, by their name below its top folder.

    Attributes:
        path: the file.
        identity: `file_identity` of what was read; compare it once the file has been used.

    Raises:
        PackageError: the file is missing, is no regular file, is no archive, or has a byte
            outside its contents that is not as `FORMAT.md` says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise PackageError(
                    path, "is not a file; give the MODEL.pt that package-model wrote"
                )
            self.identity = file_identity(path)
            with path.open("rb") as stream:
                entries = read_layout(stream, status.st_size)
        except LayoutError as error:
            raise PackageError(
                path,
                f"is damaged, cut short or no package at all ({error}); if an older Tessera "
                "wrote it, package the model again",
            ) from error
        except OSError as error:
            raise PackageError(path, f"cannot be read: {error.strerror}") from error
        self._checked: dict[str, str] = {}
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
            PackageError: there is no such record, it is larger than ``max_bytes``, or its
                stored checksum does not hold.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise PackageError(self.path, f"record {name!r} is missing")
        if entry.bytes > max_bytes:
            raise PackageError(
                self.path, f"record {name!r} has {entry.bytes} bytes, more than {max_bytes}"
            )
        content = b"".join(map(bytes, self._pieces(entry, None, ())))
        if zlib.crc32(content) != entry.crc32:
            raise PackageError(self.path, f"record {name!r} is damaged: its CRC-32 does not hold")
        return content

    def manifest_bytes(self) -> bytes:
        """The manifest's content.

        Raises:
            PackageError: it is missing or damaged.
        """
        if MANIFEST_RECORD not in self._entries:
            raise PackageError(
                self.path, f"has no {MANIFEST_RECORD}: it was not written by package-model"
            )
        return self.read(MANIFEST_RECORD, max_bytes=_MAX_MANIFEST_BYTES)

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            PackageError: it is missing, damaged, or of another format version.
        """
        try:
            return Manifest.from_bytes(self.manifest_bytes())
        except PackageError:
            raise
        except ValueError as error:
            raise PackageError(self.path, str(error)) from error

    def check(
        self,
        expected: Mapping[str, RecordInfo],
        *,
        into: Callable[[Entry], memoryview | None] = lambda _: None,
    ) -> str:
        """Read the file once and compare every record with the manifest's list.

        Args:
            expected: the list.
            into: memory for a record's content, of its size, if it is to be kept.  It holds what
                was hashed, to be used only once this has returned.

        Returns:
            SHA-256 of the whole file, lower-case hex.

        Raises:
            PackageError: a record is missing, is there without being listed, or differs.
        """
        present = self.names - {MANIFEST_RECORD}
        if missing := sorted(expected.keys() - present):
            raise PackageError(self.path, f"records are missing: {', '.join(missing)}")
        if extra := sorted(present - expected.keys()):
            raise PackageError(
                self.path, f"records are not listed in the manifest: {', '.join(extra)}"
            )
        if list(self._entries) != [*sorted(present), MANIFEST_RECORD]:
            raise PackageError(self.path, "the records are not in the order of their names")
        whole, found = self._read_through(into)
        self._checked = found
        for name in sorted(present):
            sha256 = found[name]
            entry, listed = self._entries[name], expected[name]
            if (sha256, entry.bytes) != (listed.sha256, listed.bytes):
                raise PackageError(
                    self.path,
                    f"record {name!r} was changed: SHA-256 {sha256} of {entry.bytes} bytes, the "
                    f"manifest says {listed.sha256} of {listed.bytes} bytes",
                )
            if entry.crc32 != listed.crc32:
                raise PackageError(
                    self.path,
                    f"the header of record {name!r} was changed: CRC-32 {entry.crc32:08x}, the "
                    f"manifest says {listed.crc32:08x}",
                )
        return whole

    def _read_through(
        self, into: Callable[[Entry], memoryview | None]
    ) -> tuple[str, dict[str, str]]:
        """SHA-256 of the file and, by name, of each content."""
        found: dict[str, str] = {}
        whole, own = _Hasher(), _Hasher()
        try:
            for entry in self._entries.values():
                whole.add(local_header(entry))
                place = into(entry)
                for piece in self._pieces(entry, place, (whole, own)):
                    whole.add(piece)
                    own.add(piece)
                found[entry.name] = own.take()
            whole.add(directory_and_end(list(self._entries.values())))
            return whole.take(), found
        finally:
            whole.close()
            own.close()

    def pieces_again(self, entry: Entry) -> Iterator[memoryview]:
        """A record's content from the file again; each piece is overwritten by the next.

        Raises:
            PackageError: it is not what it was when `check` read it.
        """
        digest = hashlib.sha256()
        for piece in self._pieces(entry, None, ()):
            digest.update(piece)
            yield piece
        if digest.hexdigest() != self._checked[entry.name]:
            raise PackageError(self.path, "was changed while it was being loaded; load it again")

    def _pieces(
        self, entry: Entry, place: memoryview | None, hashers: tuple[_Hasher, ...]
    ) -> Iterator[memoryview]:
        """A content, piece by piece, in ``place`` or in memory that is used again.

        Args:
            entry: which.
            place: of its size, or None.
            hashers: who must be done with a piece before its memory is used again.
        """
        step = min(entry.bytes, _CHUNK_BYTES)
        scratch = [memoryview(bytearray(step)) for _ in range(_SCRATCH_PIECES if hashers else 1)]
        done, number = 0, 0
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(entry.content_offset)
                while done < entry.bytes:
                    size = min(step, entry.bytes - done)
                    if place is not None:
                        piece = place[done : done + size]
                    else:
                        for hasher in hashers:
                            hasher.wait(at_most=_SCRATCH_PIECES - 1)
                        piece = scratch[number % len(scratch)][:size]
                    count = stream.readinto(piece)
                    if not count:
                        raise PackageError(self.path, "became shorter while it was being read")
                    yield piece[:count]
                    done += count
                    number += 1
        except OSError as error:
            raise PackageError(self.path, f"cannot be read: {error.strerror}") from error


class _Hasher:
    """SHA-256 in a thread of its own, which begins with the first large piece."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def add(self, piece: bytes | memoryview) -> None:
        """Hash a piece, whose memory must not change until `wait` says that it is done."""
        if self._thread is None and len(piece) < _WORTH_A_THREAD_BYTES:
            self._digest.update(piece)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1)
        self._waiting.append(self._thread.submit(self._digest.update, piece))

    def wait(self, *, at_most: int) -> None:
        """Until no more than ``at_most`` pieces are left."""
        while len(self._waiting) > at_most:
            self._waiting.popleft().result()

    def take(self) -> str:
        """The digest in hex of all since the last time."""
        self.wait(at_most=0)
        found, self._digest = self._digest.hexdigest(), hashlib.sha256()
        return found


def file_identity(path: Path) -> tuple[int, int, int, int]:
    """Changes whenever the file at ``path`` is replaced or written to."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
