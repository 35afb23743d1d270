"""Checkpoints of models that are spread over ranks, through ``torch.distributed.checkpoint``.

A checkpoint is a folder: torch's data files, one or more per rank, its index ``.metadata``, and
``tessera.json`` with what is not a tensor.  It does not depend on the plan, so it can be read by any
number of ranks under any plan, by one process without a process group too (`read_checkpoint`).

Whole or not at all: ranks write into a hidden folder beside the final one; when all are done and
everything is on the disk, rank 0 renames it.  A folder that has its final name is complete.

Nothing in a checkpoint is run when it is read: see
`tessera.training.distributed.checkpoint.reader`.

A save on one rank without a process group needs no other; with one, every rank must call it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tessera.training.distributed.checkpoint.basics import CheckpointError, Room
from tessera.training.distributed.checkpoint.digests import (
    INDEX,
    file_digest,
    plain_digest,
    require_equal,
)
from tessera.training.distributed.checkpoint.layout import (
    MODEL,
    OPTIMIZER,
    Content,
    WholeTensors,
    content_of,
    fill,
)
from tessera.training.distributed.checkpoint.reader import Piece, SavedTensors
from tessera.training.distributed.checkpoint.writer import (
    FORMAT,
    PLAIN_FILE,
    VERSION,
    PendingSave,
    cpu_group,
    together,
    write,
)
from tessera.training.distributed.tables.caches import forget_state_before, tell_caches
from tessera.training.distributed.tables.shard_state import sharded_tensor
from tessera.training.optim.keyed import KeyedOptimizer

_pending: PendingSave | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """Holds a checkpoint as one process reads it.

    Attributes:
        model: whole tensors by the entries' names.
        optimizer: ``state`` and ``param_groups`` as `KeyedOptimizer.state_dict` gives them, whole;
            row-wise states of tables with k column shards are ``[rows, k]``.
        extra: the ``extra`` that was given to the save.
        extra_tensors: the ``extra_tensors`` that were given to the save.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    extra: dict[str, Any]
    extra_tensors: dict[str, Tensor]


def save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a checkpoint; an older one of that name is replaced when the new one is whole.

    Args:
        folder: the checkpoint; on a file system that all ranks see.
        model: usually a `DistributedModelParallel`.
        optimizer: fused and dense ones together (`CombinedOptimizer`), or None.
        extra: plain values (JSON), rank 0's.
        extra_tensors: tensors by names of which each rank may have its own.

    Raises:
        CheckpointError: it cannot be written, on this or another rank.
    """
    _wait_for_pending()
    content = _collect(model, optimizer, extra_tensors)
    write(folder, content, dict(extra or {}), cpu_group())


def async_save_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
) -> PendingSave:
    """Copy everything now, write it in a thread while training goes on.

    Arguments as for `save_checkpoint`.  A later save or load waits for this one first; wait for
    it before the process group is destroyed.

    Memory: a copy of this rank's tensors in host memory until it is written.
    """
    global _pending  # noqa: PLW0603 - saves take turns on one process group
    _wait_for_pending()
    content = _collect(model, optimizer, extra_tensors)
    copied = replace(content, tensors={name: _copy(t) for name, t in content.tensors.items()})
    plain, group = json.loads(json.dumps(dict(extra or {}))), cpu_group()
    _pending = PendingSave(lambda: write(folder, copied, plain, group))
    return _pending


def _wait_for_pending() -> None:
    """Let a save that goes on in a thread end; its error is its own waiter's."""
    if _pending is not None:
        with contextlib.suppress(CheckpointError):
            _pending.wait()


def load_checkpoint(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: KeyedOptimizer | None = None,
    extra_tensors: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Fill a model and an optimizer in place, whatever plan and number of ranks saved them.

    Args:
        folder: the checkpoint.
        model: has the same entries in its state dict, however they are spread.
        optimizer: optimizes the same parameters with the same states; None: its part is left out.
        extra_tensors: filled in place.

    Returns:
        What was given to the save as ``extra``.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit, on this or another rank.
    """
    _wait_for_pending()
    group = cpu_group()

    def load() -> dict[str, Any]:
        plain = _read_plain(folder)
        saved = SavedTensors(folder, records=plain.get("records"))
        if optimizer is not None:
            _prepare(optimizer, plain, saved)
        content = _collect(model, optimizer, extra_tensors)
        _require_same_states(saved, plain, content)
        fill(saved, content, plain["columns"])
        if optimizer is not None:
            _load_plain(optimizer, plain, content)
        extra: dict[str, Any] = plain["extra"]
        return extra

    extra = together(group, load)
    # After all have loaded: ranks may exchange what they have loaded.
    together(group, lambda: forget_state_before(model))
    return extra


def load_whole_states(optimizer: KeyedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Fill an optimizer's states, wherever its parameters' shards are, from whole ones.

    Args:
        optimizer: of this rank's shards.
        state_dict: of the same optimizer over whole tables (`KeyedOptimizer.state_dict`).

    Raises:
        CheckpointError: a state is missing or of another shape.
    """
    content = content_of({}, optimizer)
    whole = {
        f"{OPTIMIZER}{parameter}.{key}": value
        for parameter, states in state_dict["state"].items()
        for key, value in states.items()
    }
    fill(WholeTensors(whole), content, {})
    plain = {"numbers": whole, "groups": state_dict.get("param_groups")}
    _load_plain(optimizer, plain, content)


def load_whole_tensors(targets: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Fill tensors, wherever their shards are, from whole ones of the same names.

    Raises:
        CheckpointError: one is missing or of another shape.
    """
    fill(WholeTensors(whole), Content(dict(targets), {}, {}, None), {})


def read_checkpoint(
    folder: Path, *, only_model: bool = False, room: Room | None = None
) -> SavedCheckpoint:
    """Read a whole checkpoint into this process's memory, without a process group.

    Args:
        folder: the checkpoint.
        only_model: leave the optimizer's tensors out.
        room: where the tensors are put; None: in memory.

    Raises:
        CheckpointError: it is damaged or of another kind.
    """
    plain = _read_plain(folder)
    saved = SavedTensors(folder, room, records=plain.get("records"))
    names = [n for n in saved.names if not (only_model and n.startswith(OPTIMIZER))]
    tensors = {name: saved.empty(name) for name in names}
    saved.read(Piece(name, (0,) * tensor.dim(), tensor) for name, tensor in tensors.items())
    state: dict[str, dict[str, Any]] = {}
    for name, value in {**tensors, **({} if only_model else plain["numbers"])}.items():
        if name.startswith(OPTIMIZER):
            parameter, _, key = name[len(OPTIMIZER) :].rpartition(".")
            state.setdefault(parameter, {})[key] = value
    return SavedCheckpoint(
        model={n[len(MODEL) :]: t for n, t in tensors.items() if n.startswith(MODEL)},
        optimizer={"state": state, "param_groups": plain["groups"]},
        extra=plain["extra"],
        extra_tensors={n[len(_EXTRA) :]: t for n, t in tensors.items() if n.startswith(_EXTRA)},
    )


def read_extra(folder: Path) -> dict[str, Any]:
    """What was given to the save as ``extra``; reads no tensor.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    extra: dict[str, Any] = _read_plain(folder)["extra"]
    return extra


def read_columns(folder: Path) -> dict[str, list[int]]:
    """Where column shards began, and the columns at the end, by optimized parameter; reads no tensor.

    Raises:
        CheckpointError: the folder is not a checkpoint.
    """
    columns: dict[str, list[int]] = _read_plain(folder)["columns"]
    return columns


_EXTRA = "extra."
_WITHOUT_HASHES = 1
_VERSIONS = (_WITHOUT_HASHES, VERSION)


def _collect(
    model: nn.Module,
    optimizer: KeyedOptimizer | None,
    extra_tensors: Mapping[str, Tensor] | None,
) -> Content:
    tell_caches(model, "flush")
    content = content_of(model.state_dict(), optimizer)
    content.tensors.update({_EXTRA + name: t for name, t in (extra_tensors or {}).items()})
    return content


def _copy(value: Tensor) -> Tensor:
    if isinstance(value, ShardedTensor):
        shards = [
            (shard.metadata, shard.tensor.detach().to("cpu", copy=True))
            for shard in value.local_shards()
        ]
        group = value._process_group  # noqa: SLF001 - it has no other name
        return sharded_tensor(shards, value.metadata(), group)
    return value.detach().to("cpu", copy=True)


def _read_plain(folder: Path) -> dict[str, Any]:
    path = folder / PLAIN_FILE
    try:
        plain = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not a whole sharded checkpoint: it has no {PLAIN_FILE}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is not a sharded checkpoint of Tessera's")
    version = plain.get("version")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{folder} has version {version!r}; this Tessera reads versions"
            f" {_VERSIONS[0]} to {VERSION}: use the Tessera that wrote it"
        )
    if version != _WITHOUT_HASHES:
        require_equal(str(path), plain_digest(plain), plain.get("sha256"))
        require_equal(str(folder / INDEX), file_digest(folder / INDEX), plain.get("index"))
    for name in ("columns", "numbers", "extra"):
        if not isinstance(plain.get(name), dict):
            raise CheckpointError(f"{path} is damaged: {name} is missing or not an object")
    if not isinstance(plain.get("groups"), list | None):
        raise CheckpointError(f"{path} is damaged: groups is not a list")
    return plain


def _prepare(optimizer: KeyedOptimizer, plain: dict[str, Any], saved: SavedTensors) -> None:
    """Make the states that are to be filled, where a first step would have made them."""
    with_state = set(optimizer.state_dict()["state"])
    names = [*saved.names, *plain["numbers"]]
    known = {n[len(OPTIMIZER) :].rpartition(".")[0] for n in names if n.startswith(OPTIMIZER)}
    if (known & set(optimizer.params)) - with_state:
        optimizer.init_state()


def _require_same_states(saved: SavedTensors, plain: dict[str, Any], content: Content) -> None:
    there = {n for n in [*saved.names, *plain["numbers"]] if n.startswith(OPTIMIZER)}
    here = {n for n in [*content.tensors, *content.numbers] if n.startswith(OPTIMIZER)}
    missing = sorted(here - there)
    if missing:
        raise CheckpointError(
            f"the checkpoint has no {missing[0]!r}; it was saved with another optimizer, or before "
            "that one's first step"
        )


def _load_plain(optimizer: KeyedOptimizer, plain: dict[str, Any], content: Content) -> None:
    """Numbers among the states, and the groups' settings, by parameter."""
    names = {id(value): name for name, value in optimizer.params.items()}
    for parameter, state in optimizer.state.items():
        for key in state:
            name = f"{OPTIMIZER}{names.get(id(parameter), '')}.{key}"
            if name in content.numbers:
                state[key] = plain["numbers"][name]
    by_parameter = {
        name: group for group in plain["groups"] or [] for name in group.get("params", [])
    }
    for group in optimizer.param_groups:
        owned = [names[id(p)] for p in group["params"] if id(p) in names]
        given = next((by_parameter[name] for name in owned if name in by_parameter), None)
        if given is not None:
            group.update({k: v for k, v in given.items() if k != "params" and k in group})
    optimizer.post_load_state_dict()
