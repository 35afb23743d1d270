"""Files of a run: written whole or not at all, and the names of checkpoints.

Needs no torch, so that the command line can look at a run at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from tessera.training.distributed.checkpoint.folder_names import PARTIAL_SUFFIX

TEMPORARY_SUFFIX = PARTIAL_SUFFIX
_CHECKPOINT_NAME = re.compile(r"step-(\d{10})\.(pt|shards)")


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
        remove(leftover)


def remove(path: Path) -> None:
    """Delete a file, or a folder with all in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def checkpoint_path(folder: Path, step: int, *, sharded: bool = False) -> Path:
    """The name of a checkpoint of ``step`` finished steps: a file, or with ``sharded`` a folder."""
    return folder / f"step-{step:010d}.{'shards' if sharded else 'pt'}"


def list_checkpoints(folder: Path) -> dict[int, Path]:
    """Every checkpoint of ``folder`` by its step, ascending; empty if there is no folder.

    Of a step that has both, the file.
    """
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            match = _CHECKPOINT_NAME.fullmatch(path.name)
            if match and (match.group(2) == "pt" or int(match.group(1)) not in found):
                found[int(match.group(1))] = path
    return dict(sorted(found.items()))


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is named like a checkpoint."""
    return _CHECKPOINT_NAME.fullmatch(path.name) is not None


def find_checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint of ``step`` in ``folder``, of whichever kind; a file's name if there is none."""
    return list_checkpoints(folder).get(step, checkpoint_path(folder, step))


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in ``folder``, or None."""
    return next(reversed(list_checkpoints(folder).values()), None)
