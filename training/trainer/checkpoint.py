"""Checkpoints of runs: one content, written by one process as a file or by several as a folder.

`checkpoint_file` and `checkpoint_folder` are the two forms; here is what chooses between them.  A run
may be taken up from either, by any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tessera.training.distributed.checkpoint.errors import CheckpointError
from tessera.training.distributed.checkpoint.room import Room
from tessera.training.trainer.checkpoint_file import PLAIN_KINDS, Checkpoint, read_file, write_file
from tessera.training.trainer.files import (
    checkpoint_path,
    list_checkpoints,
    remove,
    remove_leftovers,
)

if TYPE_CHECKING:
    from tessera.training.trainer.assembly import Assembly


def _folders() -> ModuleType:
    # It takes a while to import that a run of one rank need not wait.
    from tessera.training.trainer import checkpoint_folder  # noqa: PLC0415

    return checkpoint_folder


def save_checkpoint(folder: Path, step: int, assembly: Assembly, plain: dict[str, Any]) -> None:
    """Write the checkpoint of a run into ``folder``; every rank calls it.

    Args:
        folder: the run's checkpoints.
        step: finished steps.
        assembly: model and optimizers.
        plain: the fields of a `Checkpoint` that are not tensors, see `PLAIN_KINDS`.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); older ones are as they
            were.
    """
    alone = assembly.ranks.alone
    path = checkpoint_path(folder, step, sharded=not alone)
    if alone:
        content = Checkpoint(**plain, rng=torch.get_rng_state(), **assembly.state())
        write_file(path, content)
    else:
        _folders().write_folder(path, assembly, plain)


def read_plain(path: Path) -> dict[str, Any]:
    """The fields of a checkpoint that are not tensors, without reading the tensors.

    Raises:
        CheckpointError: it is damaged, or not one of a run.
    """
    if path.is_dir():
        plain: dict[str, Any] = _folders().read_folder_plain(path)
        return plain
    checkpoint = read_file(path, verify=False)
    return {name: getattr(checkpoint, name) for name in PLAIN_KINDS}


def restore(path: Path, assembly: Assembly, *, seed: int) -> None:
    """Take over weights, the optimizers' states and torch's random numbers; every rank calls it.

    Args:
        path: the checkpoint.
        assembly: filled in place.
        seed: of the random numbers of a rank that the checkpoint knows nothing of.

    Raises:
        CheckpointError: it is damaged or of another model.
    """
    if path.is_dir():
        _folders().restore_folder(path, assembly, seed=seed)
        return
    checkpoint = read_file(path)
    try:
        assembly.load(checkpoint)
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error
    if assembly.ranks.first:
        torch.set_rng_state(checkpoint.rng.clone())


def restore_model(path: Path, assembly: Assembly) -> None:
    """Take over the weights alone; every rank calls it.

    Raises:
        CheckpointError: it is damaged.
    """
    if path.is_dir():
        _folders().restore_folder_model(path, assembly)
    else:
        assembly.load_model(read_file(path))


def load_checkpoint(path: Path, *, verify: bool = True, room: Room | None = None) -> Checkpoint:
    """Read a checkpoint into this process, whole tables of it; no process group is needed.

    Args:
        path: the file, whose tensors are mapped privately, or the folder.
        verify: read the whole file once and compare its checksums first.  Without it only what
            is not a tensor is sure to be right, and a folder's tensors are left out.
        room: where the tensors of a folder are put; None: in memory.

    Raises:
        CheckpointError: it is damaged, of another kind or version, or holds anything but tensors
            and plain containers.
        OSError: it cannot be read.
    """
    if path.is_dir():
        found: Checkpoint = _folders().read_folder(path, tensors=verify, room=room)
        return found
    return read_file(path, verify=verify)


def prune_checkpoints(folder: Path, *, newest: int, best: int | None) -> None:
    """Delete every checkpoint but the ``newest`` ones and that of step ``best``.

    What a killed writer left is deleted too; only one process may write to ``folder``.
    """
    remove_leftovers(folder)
    found = list_checkpoints(folder)
    keep = {*list(found)[-newest:], best}
    for step, path in found.items():
        if step not in keep:
            remove(path)
