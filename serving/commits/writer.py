"""Write the next commit of a version: its patches, the answers of the patched model, its place in the log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tessera.errors import UserError
from tessera.serving.commits.chain import LOG_FOLDER, commit_name
from tessera.serving.commits.file import Bytes, ReadCommit, write_commit
from tessera.serving.commits.state import VersionState
from tessera.serving.package.commit import (
    COMMIT_FORMAT_VERSION,
    COMMIT_GOLDEN_RECORD,
    COMMIT_PACKAGE_RECORD,
    MAX_COMMIT_NUMBER,
    Commit,
    Patch,
)
from tessera.serving.package.golden import golden_info, write_golden
from tessera.serving.package.manifest import GoldenInfo

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True, kw_only=True)
class Change:
    """New bytes for rows of a record; see `Patch`.

    Attributes:
        record: the package's.
        table: whose rows they are; empty: no table's.
        offset: of row 0.
        stride: from one row to the next.
        rows: their numbers ``[count]``, ascending; None: all from 0 on.
        new: their bytes ``[count, width]``.
    """

    record: str
    table: str
    offset: int
    stride: int
    rows: NDArray[np.int64] | None
    new: Bytes

    @classmethod
    def whole(cls, record: str, new: Bytes, table: str = "") -> Change:
        """All ``[bytes]`` of a record."""
        return cls(
            record=record, table=table, offset=0, stride=len(new), rows=None, new=new.reshape(1, -1)
        )


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a commit says beside its patches; see `Commit`.

    ``golden`` is the content of ``golden.bin`` and how closely it must be met, where that is known; None: the
    patched model is asked.  ``package`` is the unsigned manifest of the state's package; None: left out.
    """

    newest_example_s: float | None = None
    created_s: float | None = None
    step: int | None = None
    golden: tuple[bytes, GoldenInfo] | None = None
    package: bytes | None = None


def write_next(
    state: VersionState,
    folder: Path,
    changes: Sequence[Change],
    facts: Facts,
    key: Ed25519PrivateKey | None = None,
    *,
    number: int | None = None,
) -> Path:
    """Apply ``changes`` to the state and write them as the next commit of the log.

    Args:
        state: where the log stands; it has the commit when this returns, and is as it was when it raises.
        folder: of the log.
        changes: applied in their order.
        facts: what else the commit says.
        key: to sign with; None: not signed.
        number: the commit's; None: the one after the state's.

    Returns:
        The commit's file.

    Raises:
        UserError: the commit cannot be written.
    """
    before = state.log
    number = before.number + 1 if number is None else number
    if number > MAX_COMMIT_NUMBER:
        raise UserError(f"{folder} is full; make a new version: tessera compact")
    patches, contents = _patches(changes)
    commit = Commit(
        format_version=COMMIT_FORMAT_VERSION,
        model=before.model,
        version=before.version,
        number=number,
        base=before.base,
        previous=before.sha256,
        newest_example_s=facts.newest_example_s,
        created_s=time.time() if facts.created_s is None else facts.created_s,
        step=facts.step,
        patches=patches,
        golden=state.manifest.golden,
        records={},
    )
    draft = ReadCommit(commit=commit, sha256="", contents=contents)
    old = state.apply(draft)
    try:
        golden, info = _golden(state) if facts.golden is None else facts.golden
        contents[COMMIT_GOLDEN_RECORD] = np.frombuffer(golden, np.uint8)
        if facts.package is not None:
            contents[COMMIT_PACKAGE_RECORD] = np.frombuffer(facts.package, np.uint8)
        path = folder / commit_name(number)
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        made = write_commit(path, replace(commit, golden=info), contents, key)
    except BaseException:
        state.undo(draft, old, before)
        raise
    state.log = replace(before, number=number, sha256=made.sha256)
    return path


def _golden(state: VersionState) -> tuple[bytes, GoldenInfo]:
    inputs, answers = state.answers()
    manifest = state.manifest
    info = golden_info(inputs, answers, device=manifest.device, dense_dtype=manifest.dense_dtype)
    return write_golden(inputs, answers), info


def _patches(changes: Sequence[Change]) -> tuple[tuple[Patch, ...], dict[str, Bytes]]:
    """The patches, and the records that they name; changes of the same rows share theirs."""
    patches = []
    contents: dict[str, Bytes] = {}
    named: dict[int, str] = {}
    for place, change in enumerate(changes):
        rows = ""
        if change.rows is not None:
            rows = named.setdefault(id(change.rows), f"rows/{len(named)}")
            contents[rows] = change.rows.astype("<u4").view(np.uint8)
        contents[f"bytes/{place}"] = np.ascontiguousarray(change.new).reshape(-1)
        patches.append(
            Patch(
                record=change.record,
                table=change.table,
                offset=change.offset,
                stride=change.stride,
                width=change.new.shape[1],
                count=len(change.new),
                rows=rows,
                bytes=f"bytes/{place}",
            )
        )
    return tuple(patches), contents


@contextlib.contextmanager
def publishing_lock(version_folder: Path) -> Iterator[Path]:
    """Makes the log's folder and holds its lock: one publisher at a time writes to a log.

    Where the file system has no locks, that two publishers cannot take the same number is all that is
    promised.

    Raises:
        UserError: another process publishes to this log, or the folder cannot be written to.
    """
    folder = version_folder / LOG_FOLDER
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process publishes to this log; wait for it, or end it"
            ) from None
        except OSError:
            pass
        yield folder
    finally:
        os.close(descriptor)
