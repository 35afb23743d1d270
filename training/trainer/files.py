"""Files of a run: written whole or not at all, and the names of checkpoints.

Needs no torch, so that the command line can look at a run at once.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO

TEMPORARY_SUFFIX = ".partial"
_CHECKPOINT_NAME = re.compile(r"step-(\d{10})\.pt")


def write_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a new file that then takes the place of ``path``.

    The new file has a hidden name in the same folder until it is whole and on the disk; the
    rename is on the disk when this returns.

    Raises:
        OSError: the file cannot be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left in ``folder``; nobody else may be writing there."""
    for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
        leftover.unlink()


def checkpoint_path(folder: Path, step: int) -> Path:
    """The name of the checkpoint of ``step`` finished steps in ``folder``."""
    return folder / f"step-{step:010d}.pt"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Every checkpoint of ``folder`` by its step, ascending; empty if there is no folder."""
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            match = _CHECKPOINT_NAME.fullmatch(path.name)
            if match:
                found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in ``folder``, or None."""
    return next(reversed(list_checkpoints(folder).values()), None)
