"""A new version in a repository of models: a folder that is written under a hidden name and renamed.

``DIR/NAME/.7.partial`` becomes ``DIR/NAME/7`` when its model.pt is whole and on the disk.  The hidden folder
also reserves its number: making a folder succeeds for one of several publishers only, and the others
take the next number.  Its publisher keeps it locked (flock), so that one whose publisher was
killed can be told from one that is being written.  docs/repository.md has the layout.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tessera.durable import PARTIAL_SUFFIX, sync
from tessera.errors import UserError

PACKAGE_FILE = "model.pt"
"""A version's package within its folder."""

TIDY_UNLOCKED_AFTER_S = 60.0
"""A hidden folder that nobody has locked is removed after so long: its publisher may not have locked it yet."""

TIDY_UNKNOWN_AFTER_S = 24 * 3600.0
"""The same where the file system has no locks on folders (NFS), since the last change."""

_VERSION = re.compile(r"[1-9][0-9]*")
_HIDDEN = re.compile(rf"\.([1-9][0-9]*){re.escape(PARTIAL_SUFFIX)}")
# Servers keep versions in 64 bits with a sign.
_MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class NewVersion:
    """A version that is being written: its number, where its package goes, and where that will be."""

    number: int
    draft: Path
    path: Path


@contextlib.contextmanager
def publishing(repository: Path, name: str, version: int | None = None) -> Iterator[NewVersion]:
    """Reserves a version of model ``name``; what the block writes to ``draft`` is published at its end.

    ``version`` is the number to take; None takes the highest that there is, or that is being written, + 1.
    A model's first version makes its folder.  When the block raises, the repository stays as it was.
    Hidden folders that killed publishers left are removed on the way.

    Raises:
        UserError: the repository does not exist or cannot be written to, or the version is there
            already or is being written by somebody else.
    """
    repository = repository.expanduser()
    if not repository.is_dir():
        raise UserError(f"--repository {repository} is not a folder; make it first")
    if version is not None and not 1 <= version <= _MAX_VERSION:
        raise UserError(f"--version is {version}; give a whole number from 1 to {_MAX_VERSION}")
    model = repository / name
    with _reserved(model, version) as number:
        hidden, published = _hidden(model, number), model / str(number)
        yield NewVersion(number=number, draft=hidden / PACKAGE_FILE, path=published / PACKAGE_FILE)
        with _refusing(model):
            sync(hidden)
            hidden.rename(published)
            sync(model)
            sync(repository)


@contextlib.contextmanager
def _refusing(model: Path) -> Iterator[None]:
    """Turns an error of the operating system into the user's."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--repository {model.parent}: {error.filename or model} cannot be written: {error.strerror}; "
            "give a repository that can"
        ) from error


@contextlib.contextmanager
def _reserved(model: Path, version: int | None) -> Iterator[int]:
    """Makes and locks a version's hidden folder; what is left of it at the end is removed."""
    with _refusing(model):
        number, lock = _reserve(model, version)
    try:
        yield number
    finally:
        shutil.rmtree(_hidden(model, number), ignore_errors=True)
        os.close(lock)
        with contextlib.suppress(OSError):  # a model without versions is none
            model.rmdir()


def _reserve(model: Path, version: int | None) -> tuple[int, int]:
    """The number that is ours and the descriptor that holds its lock."""
    while True:
        model.mkdir(exist_ok=True)
        _tidy(model)
        number = _highest(model) + 1 if version is None else version
        hidden = _hidden(model, number)
        taken = (model / str(number)).exists
        try:
            if not taken():
                hidden.mkdir()
        except FileExistsError:
            if version is not None:
                raise UserError(
                    f"--version {version}: another package-model is writing {model / str(version)}, or was "
                    f"killed a moment ago; wait for it, leave --version out, or remove {hidden}"
                ) from None
            continue
        except FileNotFoundError:  # another publisher failed and removed the model's empty folder
            continue
        # Looked at again: it may have been published between the first look and our folder.
        if taken():
            with contextlib.suppress(FileNotFoundError):
                hidden.rmdir()
            if version is None:
                continue
            raise UserError(
                f"--version {version}: {model / str(version)} exists, and a version never changes; give "
                "another number, or leave --version out for the next one"
            )
        lock = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):  # no locks here: the folder's age tells
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return number, lock


def _hidden(model: Path, number: int) -> Path:
    return model / f".{number}{PARTIAL_SUFFIX}"


def _highest(model: Path) -> int:
    """The highest number that is a version's or reserved; 0 where there is none."""
    names = [path.name for path in model.iterdir()]
    reserved = [found.group(1) for name in names if (found := _HIDDEN.fullmatch(name))]
    return max(map(int, [*filter(_VERSION.fullmatch, names), *reserved]), default=0)


def _tidy(model: Path) -> None:
    """Remove the hidden folders of publishers that are gone."""
    for folder in model.iterdir():
        if _HIDDEN.fullmatch(folder.name) and _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    try:
        changed = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        age_s = time.time() - changed
        if age_s < TIDY_UNLOCKED_AFTER_S:
            return False
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # somebody else removes it, or it has just been published
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return age_s >= TIDY_UNKNOWN_AFTER_S
    else:
        return True
    finally:
        os.close(lock)
