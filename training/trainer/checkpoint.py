"""Checkpoints of runs: one content, which one process writes as a file and several as a folder.

`checkpoint_file` is the file; `tessera.training.distributed.checkpoint` writes and reads the folder,
``step-0000001234.shards``.  A run may be taken up from either, by any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tessera.training.distributed.checkpoint.basics import CheckpointError, Room
from tessera.training.trainer.checkpoint_file import PLAIN_KINDS, Checkpoint, read_file, write_file
from tessera.training.trainer.checkpoint_versions import upgraded
from tessera.training.trainer.files import (
    checkpoint_path,
    list_checkpoints,
    remove,
    remove_leftovers,
)

if TYPE_CHECKING:
    from tessera.training.trainer.assembly import Assembly


def _sharded() -> ModuleType:
    # It takes a while to import that a run of one rank need not wait.
    from tessera.training.distributed.checkpoint import save_and_load  # noqa: PLC0415

    return save_and_load


def save_checkpoint(folder: Path, step: int, assembly: Assembly, plain: dict[str, Any]) -> None:
    """Write the checkpoint of a run into ``folder``; every rank calls it.

    ``plain`` holds the fields of a `Checkpoint` that are not tensors, see `PLAIN_KINDS`.

    Raises:
        CheckpointError: it cannot be written (disk full, no permission); older ones are as they
            were.
    """
    ranks = assembly.ranks
    path = checkpoint_path(folder, step, sharded=not ranks.alone)
    if ranks.alone:
        write_file(path, Checkpoint(**plain, rng=torch.get_rng_state(), **assembly.state()))
        return
    _sharded().save_checkpoint(
        path,
        model=assembly.model,
        optimizer=assembly.keyed_optimizer(),
        extra={
            **plain,
            "ranks": ranks.world_size,
            "averaged": bool(assembly.average_tensors()),
        },
        extra_tensors={
            f"rng.{ranks.rank}": torch.get_rng_state(),
            **_named(assembly.average_tensors()),
        },
    )


_AVERAGE = "average."


def _named(averages: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Averages under their names in a folder."""
    return {_AVERAGE + name: value for name, value in averages.items()}


def _room_for_averages(plain: Mapping[str, Any], assembly: Assembly) -> dict[str, torch.Tensor]:
    """The averages that a folder is to fill, by their names there."""
    if assembly.averages is None:
        return {}
    assembly.averages.begin({"": None} if plain.get("averaged") else None)
    return _named(assembly.averages.tensors)


def read_plain(path: Path) -> dict[str, Any]:
    """The fields of a checkpoint that are not tensors, without reading the tensors.

    Of a folder also ``ranks``, the number of those that wrote it.

    Raises:
        CheckpointError: it is damaged, or not one of a run.
    """
    if not path.is_dir():
        checkpoint = read_file(path, verify=False)
        return {name: getattr(checkpoint, name) for name in PLAIN_KINDS}
    try:
        plain = upgraded(_sharded().read_extra(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is not a whole checkpoint of a run: {error}") from error
    for name, kind in {**PLAIN_KINDS, "ranks": int}.items():
        if not isinstance(plain.get(name), kind):
            raise CheckpointError(f"{path} is not a whole checkpoint of a run: no {name}")
    return plain


def restore(path: Path, assembly: Assembly, *, seed: int) -> None:
    """Take over weights, the optimizers' states and torch's random numbers; every rank calls it.

    ``seed`` is that of the random numbers of a rank that the checkpoint knows nothing of.

    Raises:
        CheckpointError: it is damaged or of another model.
    """
    ranks = assembly.ranks
    if not path.is_dir():
        checkpoint = read_file(path)
        try:
            assembly.load(checkpoint)
        except (ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{path} does not fit this model: {error}") from error
        if ranks.first:
            torch.set_rng_state(checkpoint.rng.clone())
        return
    plain, state = read_plain(path), torch.get_rng_state()
    known = ranks.rank < plain["ranks"]
    _sharded().load_checkpoint(
        path,
        model=assembly.model,
        optimizer=assembly.keyed_optimizer(),
        extra_tensors={
            **({f"rng.{ranks.rank}": state} if known else {}),
            **_room_for_averages(plain, assembly),
        },
    )
    if known:
        torch.set_rng_state(state)
    else:
        torch.manual_seed(seed + 1_000_003 * ranks.rank + int(plain["progress"].get("step", 0)))


def restore_model(path: Path, assembly: Assembly) -> None:
    """Take over the weights and their averages alone; every rank calls it.

    Raises:
        CheckpointError: it is damaged.
    """
    if path.is_dir():
        averages = _room_for_averages(read_plain(path), assembly)
        _sharded().load_checkpoint(path, model=assembly.model, extra_tensors=averages)
    else:
        assembly.load_model(read_file(path))


def load_checkpoint(path: Path, *, room: Room | None = None) -> Checkpoint:
    """Read a checkpoint into this process, whole tables of it; no process group is needed.

    The tensors of a file are mapped privately; those of a folder are put into ``room`` (None:
    memory), without the states of its optimizers.

    Raises:
        CheckpointError: it is damaged, of another kind or version, or holds anything but tensors
            and plain containers.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return read_file(path)
    plain = read_plain(path)
    saved = _sharded().read_checkpoint(path, only_model=True, room=room)
    return Checkpoint(
        **{name: plain[name] for name in PLAIN_KINDS},
        model=saved.model,
        average={
            name.removeprefix(_AVERAGE): value
            for name, value in saved.extra_tensors.items()
            if name.startswith(_AVERAGE)
        },
        fused_optimizer={},
        dense_optimizer={},
        rng=saved.extra_tensors["rng.0"],
    )


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
