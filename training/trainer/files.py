"""The names of a run's checkpoints.

Needs no torch, so that the command line can look at a run at once.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tessera.durable import PARTIAL_SUFFIX

_CHECKPOINT_NAME = re.compile(r"step-(\d{10})\.(pt|shards)")


def remove_leftovers(folder: Path) -> None:
    """Delete what killed writers left in ``folder``; nobody else may be writing there."""
    for leftover in folder.glob(f".*{PARTIAL_SUFFIX}"):
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


def run_of(source: Path) -> Path:
    """The folder of a run that is named by itself or by one of its checkpoints."""
    return source.parent.parent if is_checkpoint(source) else source
