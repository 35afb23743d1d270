"""A commit's file: written whole or not at all, and read with every byte compared.

The layout is that of a package (`tessera.serving.package.layout`), with other records: ``commit.json``
last, which lists the others.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tessera.durable import PARTIAL_SUFFIX, sync
from tessera.errors import UserError
from tessera.serving.package.archive import Archive, ArchiveError, ArchiveKind
from tessera.serving.package.commit import (
    COMMIT_GOLDEN_RECORD,
    COMMIT_RECORD,
    COMMIT_TOP_FOLDER,
    MAX_COMMIT_JSON_BYTES,
    Commit,
    Patch,
)
from tessera.serving.package.layout import ArchiveWriter
from tessera.serving.package.signed_record import RecordInfo, unsigned_sha256

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

    from tessera.serving.package.pace import Pace

Bytes: TypeAlias = NDArray[np.uint8]

_MAPPED_BYTES = 16 << 10  # of smaller records the rest of the last page would be too much

_SIGN_REMEDY = "publish with --sign KEY.pem"


class CommitError(ArchiveError):
    """A commit is not taken; the message names the file and why.

    Attributes:
        refusal: one of `REFUSALS`.
    """

    word = "commit"

    def __init__(self, path: Path, reason: str, refusal: str = "damaged") -> None:
        super().__init__(path, reason)
        self.refusal = refusal


class CommitRecords(Archive):
    """The records of a commit, by their name below its top folder; see `Archive`."""

    kind: ClassVar[ArchiveKind] = ArchiveKind(
        top_folder=COMMIT_TOP_FOLDER,
        last_record=COMMIT_RECORD,
        max_last_bytes=MAX_COMMIT_JSON_BYTES,
        last_word=COMMIT_RECORD,
        not_a_file="is not a file",
        not_laid_out="is damaged, cut short or no commit at all ({error})",
        not_this_kind=f"has no {COMMIT_RECORD}: it is not a commit",
        error=CommitError,
    )


@dataclass(frozen=True, kw_only=True)
class ReadCommit:
    """A commit of which every byte is as it was written.

    Attributes:
        commit: what it says of itself.
        sha256: `unsigned_sha256` of its ``commit.json``.
        contents: its other records, by name.
        last_rows: what `last_row` says of records of rows' numbers, of those that were looked at already.
    """

    commit: Commit
    sha256: str
    contents: Mapping[str, Bytes]
    last_rows: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def golden(self) -> bytes:
        """The golden answers, in the form of a package's."""
        return self.contents[COMMIT_GOLDEN_RECORD].tobytes()

    def rows(self, patch: Patch) -> NDArray[np.int64] | None:
        """The numbers ``[count]`` of a patch's rows; None: 0, 1, ... ``count - 1``."""
        return None if not patch.rows else _rows(self.contents[patch.rows])

    def stored_rows(self, patch: Patch) -> NDArray[np.int32] | None:
        """The same numbers where this commit's own memory has them; None where it has none that fit into 31 bits."""
        if not patch.rows:
            return None
        stored = self.contents[patch.rows].view("<i4")
        return stored if not len(stored) or int(stored[-1]) >= 0 else None  # they ascend

    def last_row(self, patch: Patch) -> int:
        """The number of a patch's last row."""
        return int(self.contents[patch.rows].view("<u4")[-1]) if patch.rows else patch.count - 1

    def new_bytes(self, patch: Patch) -> Bytes:
        """The new bytes of a patch ``[count, width]``."""
        return self.contents[patch.bytes].reshape(patch.count, patch.width)

    def check_fits(self, sizes: Mapping[str, int]) -> None:
        """Whether every row lies within its record, and none is there twice.

        Args:
            sizes: bytes of the package's records.

        Raises:
            ValueError: one does not; says which patch.
        """
        self.commit.check_fits(sizes)
        for place, patch in enumerate(self.commit.patches):
            if not patch.rows:
                continue
            name = patch.rows
            last = self.last_rows[name] if name in self.last_rows else last_row(self.contents[name])
            if last is None:
                raise ValueError(f"commit.patches[{place}]: the rows' numbers do not ascend")
            end = patch.offset + last * patch.stride + patch.width
            if end > sizes[patch.record]:
                raise ValueError(
                    f"commit.patches[{place}]: row {last} reaches past the "
                    f"{sizes[patch.record]} bytes of {patch.record!r}"
                )


def last_row(content: Bytes) -> int | None:
    """The last of rows' numbers, as a commit's record has them; None: they do not ascend."""
    rows = content.view("<u4")
    return int(rows[-1]) if bool((rows[1:] > rows[:-1]).all()) else None


@dataclass(frozen=True, kw_only=True)
class OpenedCommit:
    """A commit of which nothing but ``commit.json`` was read.

    Attributes:
        records: the file's.
        commit: what it says of itself.
        sha256: `unsigned_sha256` of its ``commit.json``.
    """

    records: CommitRecords
    commit: Commit
    sha256: str


def open_commit(path: Path, trusted_keys: Sequence[Ed25519PublicKey] | None = None) -> OpenedCommit:
    """Read what a commit says of itself; its other records are not looked at.

    Args:
        path: its file.
        trusted_keys: the public keys of which one must have signed it; None: signatures are not looked at.

    Raises:
        CommitError: see `read_commit`.
    """
    records = CommitRecords(path)
    content = records.last_bytes()
    try:
        commit = Commit.from_bytes(content)
    except ValueError as error:
        raise CommitError(path, str(error), "schema") from error
    if trusted_keys is not None:
        # Only who asks for signatures needs the library.
        from tessera.serving.package.signing import (  # noqa: PLC0415
            SignatureError,
            check_record_signature,
        )

        try:
            check_record_signature(
                content, commit.signature, trusted_keys, what="commit", remedy=_SIGN_REMEDY
            )
        except SignatureError as error:
            raise CommitError(path, str(error), "unsigned") from error
    return OpenedCommit(
        records=records, commit=commit, sha256=unsigned_sha256(content, COMMIT_RECORD)
    )


def read_commit(
    path: Path,
    trusted_keys: Sequence[Ed25519PublicKey] | None = None,
    pace: Pace | None = None,
) -> ReadCommit:
    """Read a commit and compare every byte.

    Args:
        path: its file.
        trusted_keys: the public keys of which one must have signed it; None: signatures are not looked at.
        pace: that of the thread, where others are answered meanwhile; None: it does not pause.

    Raises:
        CommitError: the file is missing, damaged or changed, of another format, or not signed as asked.
    """
    opened = open_commit(path, trusted_keys)
    opened.records.pace = pace
    contents: dict[str, Bytes] = {}

    def into(entry: Any) -> memoryview:
        contents[entry.name] = _own_memory(entry.bytes)
        return contents[entry.name].data

    opened.records.check(opened.commit.records, into=into)
    return ReadCommit(commit=opened.commit, sha256=opened.sha256, contents=contents)


def write_commit(
    path: Path,
    commit: Commit,
    contents: Mapping[str, bytes | Bytes],
    key: Ed25519PrivateKey | None = None,
) -> ReadCommit:
    """Write a commit to ``path``, where nothing may be yet, whole or not at all.

    Args:
        path: its file; others lie beside it under names that begin with a dot until they are whole.
        commit: everything but ``records`` and the signature.
        contents: every record but the last.
        key: to sign with; None: not signed.

    Returns:
        What `read_commit` will read.

    Raises:
        UserError: the file is there already or cannot be written, or no server would take it.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    arrays = {name: _array(content) for name, content in contents.items()}
    try:
        with partial.open("w+b") as stream:
            writer = ArchiveWriter(stream, top=COMMIT_TOP_FOLDER)
            infos = {}
            for name in sorted(arrays):
                written = writer.add(name, [arrays[name].data], arrays[name].nbytes)
                infos[name] = RecordInfo(
                    sha256=written.sha256,
                    bytes=written.bytes,
                    crc32=written.crc32,
                    chunks=written.chunks,
                )
            made = _signed(replace(commit, records=infos, signature=None), key)
            last = made.to_bytes()
            try:
                Commit.from_bytes(last)
            except ValueError as error:
                raise UserError(f"{path} would not be read by any server: {error}") from error
            writer.add(COMMIT_RECORD, [last], len(last))
            writer.finish()
        sync(partial)
        _publish(partial, path)
        sync(path.parent)
    except FileExistsError as error:
        raise UserError(f"{path} is there already: somebody else publishes to this log") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
    return ReadCommit(commit=made, sha256=unsigned_sha256(last, COMMIT_RECORD), contents=arrays)


def _publish(partial: Path, path: Path) -> None:
    """Give the file its name, which nobody may have."""
    try:
        os.link(partial, path)  # unlike a rename, it replaces nothing
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
        # A file system without hard links; publishers of one log exclude one another by its lock.
        if path.exists():
            raise FileExistsError(error.errno, "exists", path) from error
        partial.rename(path)


def _signed(commit: Commit, key: Ed25519PrivateKey | None) -> Commit:
    if key is None:
        return commit
    from tessera.serving.package.signing import signature_of  # noqa: PLC0415 - only who signs needs it

    return replace(commit, signature=signature_of(commit.to_bytes(), key))


def _array(content: bytes | Bytes) -> Bytes:
    if isinstance(content, np.ndarray):
        return np.ascontiguousarray(content).reshape(-1).view(np.uint8)
    return np.frombuffer(content, np.uint8)


def _own_memory(size: int) -> Bytes:
    """``[size]`` bytes, which the system has back as soon as nobody uses them.

    What a server keeps to go back comes and goes in the order of commits and on many threads. The C library would give each
    thread a part of the memory of its own, and keep the holes in each.
    """
    if size < _MAPPED_BYTES:
        return np.empty(size, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def _rows(content: Bytes) -> NDArray[np.int64]:
    return content.view("<u4").astype(np.int64)
