"""The checkpoint of several ranks: a folder ``step-0000001234.shards``.

`tessera.training.distributed.checkpoint` writes and reads them; here is what a run keeps in one.
A run may be taken up by another number of ranks, one included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tessera.training.distributed.checkpoint.errors import CheckpointError
from tessera.training.distributed.checkpoint.room import Room
from tessera.training.distributed.checkpoint.save_and_load import (
    load_checkpoint,
    read_checkpoint,
    read_extra,
    save_checkpoint,
)
from tessera.training.trainer.assembly import Assembly
from tessera.training.trainer.checkpoint_file import PLAIN_KINDS, Checkpoint

_PLAIN = {**PLAIN_KINDS, "ranks": int}


def write_folder(path: Path, assembly: Assembly, plain: dict[str, Any]) -> None:
    """Write the checkpoint of a run; every rank calls it.

    Args:
        path: the folder to be.
        assembly: model and optimizers.
        plain: the fields of a `Checkpoint` that are not tensors.

    Raises:
        CheckpointError: it cannot be written; older ones are as they were.
    """
    ranks = assembly.ranks
    save_checkpoint(
        path,
        model=assembly.model,
        optimizer=assembly.keyed_optimizer(),
        extra={**plain, "ranks": ranks.world_size},
        extra_tensors={f"rng.{ranks.rank}": torch.get_rng_state()},
    )


def read_folder_plain(path: Path) -> dict[str, Any]:
    """The fields of a checkpoint that are not tensors.

    Raises:
        CheckpointError: it is damaged, or no run's.
    """
    extra = read_extra(path)
    for name, kind in _PLAIN.items():
        if not isinstance(extra.get(name), kind):
            raise CheckpointError(f"{path} is not a whole checkpoint of a run: no {name}")
    return extra


def restore_folder(path: Path, assembly: Assembly, *, seed: int) -> None:
    """Take over weights, the optimizers' states and this rank's random numbers.

    Args:
        path: the folder.
        assembly: filled in place.
        seed: of the random numbers of a rank that the checkpoint knows nothing of.

    Raises:
        CheckpointError: it is damaged or of another model.
    """
    plain = read_folder_plain(path)
    state = torch.get_rng_state()
    ranks = assembly.ranks
    known = ranks.rank < plain["ranks"]
    load_checkpoint(
        path,
        model=assembly.model,
        optimizer=assembly.keyed_optimizer(),
        extra_tensors={f"rng.{ranks.rank}": state} if known else None,
    )
    if known:
        torch.set_rng_state(state)
    else:
        torch.manual_seed(seed + 1_000_003 * ranks.rank + int(plain["progress"].get("step", 0)))


def restore_folder_model(path: Path, assembly: Assembly) -> None:
    """Take over the weights alone; every rank calls it.

    Raises:
        CheckpointError: it is damaged or of another model.
    """
    load_checkpoint(path, model=assembly.model)


def read_folder(path: Path, *, tensors: bool = True, room: Room | None = None) -> Checkpoint:
    """The checkpoint with whole tables in this process's memory; no process group is needed.

    Args:
        path: the folder.
        tensors: read them; otherwise the fields with tensors are empty.
        room: where they are put; None: in memory.

    Raises:
        CheckpointError: it is damaged, or no run's.
    """
    plain = read_folder_plain(path)
    fields = {name: plain[name] for name in _PLAIN if name != "ranks"}
    if not tensors:
        return Checkpoint(
            **fields, model={}, fused_optimizer={}, dense_optimizer={}, rng=torch.empty(0)
        )
    saved = read_checkpoint(path, only_model=True, room=room)
    return Checkpoint(
        **fields,
        model=saved.model,
        fused_optimizer={},
        dense_optimizer={},
        rng=saved.extra_tensors["rng.0"],
    )
