"""The package file as a plain zip archive: which records it has and what they hash to.

Nothing here runs or unpickles anything of the archive, so it is safe on a file from anywhere.
torch's own reader and Python's must see the same file, or checking with one would say nothing
about the other: whatever would let them differ (a name twice, bytes before or after the
archive, several top folders) is refused.
"""

from __future__ import annotations

import hashlib
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.manifest import MANIFEST_RECORD, Manifest, RecordInfo

_CHUNK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 256 << 20
_END_OF_ARCHIVE = b"PK\x05\x06"
_END_OF_ARCHIVE_BYTES = 22
_HASHING_THREADS = 4

# Everything that zipfile raises over a damaged archive: ValueError is for names that are no
# UTF-8, EOFError for a cut record, RuntimeError and NotImplementedError (one of its kind) for
# encryption and methods that it does not know.
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError)


class PackageError(UserError):
    """A package is not served; the message names the file and why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"package {path}: {reason}")
        self.path = path
        self.reason = reason


class Records:
    """The records of one archive, by their name below its top folder.

    Raises:
        PackageError: the file is missing, is no regular file, is no zip archive, or is one that
            two readers might read differently.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            status = path.stat()
        except OSError as error:
            raise PackageError(path, f"cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise PackageError(path, "is not a file; give the MODEL.pt that package-model wrote")
        try:
            _check_end(path, status.st_size)
            with zipfile.ZipFile(path) as archive:
                infos = archive.infolist()
        except _DAMAGE as error:
            raise PackageError(
                path, f"is damaged, cut short or no package at all ({error})"
            ) from error
        except OSError as error:
            raise PackageError(path, f"cannot be read: {error.strerror}") from error
        self._infos = self._by_name(infos)

    def _by_name(self, infos: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
        if not infos or min(info.header_offset for info in infos) != 0:
            raise PackageError(self.path, "the archive does not begin at the file's first byte")
        top = infos[0].orig_filename.partition("/")[0]
        by_name: dict[str, zipfile.ZipInfo] = {}
        for info in infos:
            name = info.orig_filename
            parts = name.split("/")
            if (
                any(part in {"", ".", ".."} for part in parts)
                or "\\" in name
                or "\0" in name
                or len(parts) < 2
                or parts[0] != top
            ):
                raise PackageError(self.path, f"record {name!r} has a name that no package uses")
            short = name[len(top) + 1 :]
            if short in by_name:
                raise PackageError(self.path, f"record {short!r} is there twice")
            by_name[short] = info
        return by_name

    @property
    def names(self) -> frozenset[str]:
        """Every record's name."""
        return frozenset(self._infos)

    def read(self, name: str, *, max_bytes: int) -> bytes:
        """The content of record ``name``.

        Raises:
            PackageError: there is no such record, it is larger than ``max_bytes``, or its
                stored checksum does not hold.
        """
        info = self._infos.get(name)
        if info is None:
            raise PackageError(self.path, f"record {name!r} is missing")
        if info.file_size > max_bytes:
            raise PackageError(
                self.path, f"record {name!r} has {info.file_size} bytes, more than {max_bytes}"
            )
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(info)
        except (*_DAMAGE, OSError) as error:
            raise self._damaged(name, error) from error

    def manifest(self) -> Manifest:
        """The manifest.

        Raises:
            PackageError: it is missing, damaged, or of another format version.
        """
        if MANIFEST_RECORD not in self._infos:
            raise PackageError(
                self.path, f"has no {MANIFEST_RECORD}: it was not written by package-model"
            )
        content = self.read(MANIFEST_RECORD, max_bytes=_MAX_MANIFEST_BYTES)
        try:
            return Manifest.from_bytes(content)
        except ValueError as error:
            raise PackageError(self.path, str(error)) from error

    def hash_all(self) -> dict[str, RecordInfo]:
        """Size and SHA-256 of every record but the manifest.

        Raises:
            PackageError: a record cannot be read or its stored checksum does not hold.
        """
        names = [name for name in self._infos if name != MANIFEST_RECORD]
        # The largest first, so that no thread is left alone with it at the end.
        names.sort(key=lambda name: self._infos[name].file_size, reverse=True)
        with ThreadPoolExecutor(_HASHING_THREADS) as pool:
            return dict(zip(names, pool.map(self._hash, names), strict=True))

    def _hash(self, name: str) -> RecordInfo:
        digest = hashlib.sha256()
        size = 0
        try:
            # A file of its own per thread: a shared one would take turns at a lock.
            with zipfile.ZipFile(self.path) as archive, archive.open(self._infos[name]) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    size += len(chunk)
        except (*_DAMAGE, OSError) as error:
            raise self._damaged(name, error) from error
        return RecordInfo(sha256=digest.hexdigest(), bytes=size)

    def _damaged(self, name: str, error: Exception) -> PackageError:
        return PackageError(self.path, f"record {name!r} is damaged ({error})")

    def check(self, expected: Mapping[str, RecordInfo]) -> None:
        """Compare every record with the manifest's list.

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
        found = self.hash_all()
        for name in sorted(found):
            if found[name] != expected[name]:
                raise PackageError(
                    self.path,
                    f"record {name!r} was changed: SHA-256 {found[name].sha256} of "
                    f"{found[name].bytes} bytes, the manifest says {expected[name].sha256} of "
                    f"{expected[name].bytes} bytes",
                )


def _check_end(path: Path, size: int) -> None:
    """The end record is the file's last bytes, so that every reader finds the same one."""
    if size < _END_OF_ARCHIVE_BYTES:
        raise zipfile.BadZipFile("too short")
    with path.open("rb") as stream:
        stream.seek(size - _END_OF_ARCHIVE_BYTES)
        tail = stream.read()
    if not tail.startswith(_END_OF_ARCHIVE) or tail[-2:] != b"\0\0":
        raise zipfile.BadZipFile("the archive's end record is not at the file's end")


def file_sha256(path: Path) -> str:
    """SHA-256 of the whole file, in lower-case hex: what ``sha256sum`` prints."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def file_identity(path: Path) -> tuple[int, int, int, int]:
    """Changes whenever the file at ``path`` is replaced or written to."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
