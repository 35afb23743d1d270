"""``log/fenced.json``: the commits that were rolled back, which nobody may take again.

It grows only, by rename.  Whoever rolls a version back, or finds the log broken and publishes all the same,
fences off what lies behind the state that stays.  Who adds to it holds the lock of ``log/.fenced.lock`` from
before it is read until the new file is in its place, so that of several who add none loses another's entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tessera.durable import replacing
from tessera.errors import UserError
from tessera.serving.commits.chain import Fence, commit_name, parse_commit_name
from tessera.serving.commits.file import CommitError, CommitRecords
from tessera.serving.package.commit import COMMIT_RECORD, MAX_COMMIT_NUMBER
from tessera.serving.package.fields import Between, Sha256, decode
from tessera.serving.package.signed_record import encode_fields, to_record, unsigned_sha256
from tessera.serving.package.strict_json import first_twice, read_strictly
from tessera.serving.repository.small_file import read_small_file

FENCE_NAME = "fenced.json"
LOCK_NAME = ".fenced.lock"
MAX_FENCE_BYTES = 4 << 20
FENCE_FORMAT = 1

_PATIENCE_S = 10
_PAUSE_S = 0.01


@dataclass(frozen=True, kw_only=True)
class FencedCommit:
    """One entry: the number, and `unsigned_sha256` of the ``commit.json`` (null: it could not be read)."""

    number: Annotated[int, Between(1, MAX_COMMIT_NUMBER)]
    sha256: Sha256 | None


@dataclass(frozen=True, kw_only=True)
class FenceFile:
    """What the file holds, in ascending order of numbers."""

    format: Annotated[int, Between(FENCE_FORMAT, FENCE_FORMAT)]
    fenced: tuple[FencedCommit, ...]


def parse_fence(content: bytes) -> Fence:
    """Read the file's content.

    Raises:
        ValueError: it is not as `write_fence` writes it.
    """
    try:
        data = read_strictly(content)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    file = decode(FenceFile, data, "fence", FENCE_FORMAT)
    numbers = [one.number for one in file.fenced]
    if len(set(numbers)) != len(numbers):
        twice = first_twice(map(str, numbers))
        raise ValueError(f"fence.fenced: number {twice} is there twice")
    if numbers != sorted(numbers):
        raise ValueError("fence.fenced: the numbers are not ascending")
    return Fence({one.number: one.sha256 or "" for one in file.fenced})


def read_fence(log: Path) -> Fence:
    """The fence of a log's folder; empty where there is none.

    Raises:
        UserError: the file cannot be read, or is not one.
    """
    path = log / FENCE_NAME
    content = read_small_file(path, MAX_FENCE_BYTES)
    if content is None:
        return Fence()
    try:
        return parse_fence(content)
    except ValueError as error:
        raise UserError(
            f"{path}: is not a list of fenced commits ({error}); restore it, or roll back anew"
        ) from error


def fence_off_after(log: Path, number: int) -> Fence:
    """Fence off every commit after ``number`` that lies in the log's folder; returns all that are fenced.

    Args:
        log: the folder.
        number: of the commit that stays the last one; 0: none stays.

    Raises:
        UserError: the folder or the fence cannot be read or written, or ``number`` is not a commit of the log.
    """
    fence = read_fence(log)
    try:
        numbers = {parse_commit_name(path.name) for path in log.iterdir()} - {None}
    except OSError as error:
        raise UserError(f"{log} cannot be read: {error.strerror}") from error
    if number in fence.commits or (number and number not in numbers):
        is_not = "was fenced off" if number in fence.commits else "is not in it"
        raise UserError(f"{log}: commit {number} {is_not}; name one that is in the log")
    later = [one for one in numbers - fence.commits.keys() if one is not None and one > number]
    return write_fence(log, {one: _sha256(log / commit_name(one)) for one in later})


def _sha256(path: Path) -> str:
    """`unsigned_sha256` of a commit's description; empty where it cannot be read."""
    try:
        return unsigned_sha256(CommitRecords(path).last_bytes(), COMMIT_RECORD)
    except (CommitError, ValueError):
        return ""


def write_fence(log: Path, more: Mapping[int, str]) -> Fence:
    """Fence off ``more`` commits, by number their hash (empty: not known); returns all that are fenced.

    Waits for others who add to the fence, for 10 seconds at most.

    Raises:
        UserError: the file is there and cannot be read, or cannot be written, or others take too long.
    """
    with _locked(log / LOCK_NAME):
        return _write_fence(log, more)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of the file, which is made for it and stays; nothing where the file system has no locks."""
    try:
        descriptor = _open(path)
    except OSError as error:
        raise UserError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(
                        f"{path}: another process has held this lock for {_PATIENCE_S} s; "
                        "try again, or end that process"
                    ) from None
                time.sleep(_PAUSE_S)
            except OSError:
                break
        yield
        # A process that was forked meanwhile has the descriptor, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        # To write, as network file systems lock for others than readers only then.
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:  # another user's
        return os.open(path, os.O_RDONLY)


def _write_fence(log: Path, more: Mapping[int, str]) -> Fence:
    fence = Fence({**more, **read_fence(log).commits})
    entries = tuple(
        FencedCommit(number=number, sha256=sha256 or None)
        for number, sha256 in sorted(fence.commits.items())
    )
    content = to_record(encode_fields(FenceFile(format=FENCE_FORMAT, fenced=entries), FENCE_FORMAT))
    try:
        with replacing(log / FENCE_NAME) as stream:
            stream.write(content)
    except OSError as error:
        raise UserError(f"{log / FENCE_NAME} cannot be written: {error.strerror}") from error
    return fence
