"""Reading checkpoints to convert: folders and files of both libraries, without running anything.

* a folder of ``torch.distributed.checkpoint`` (`SavedTensors` lets no other class into its index);
* a file of ``torch.save``, read with ``weights_only``: a state dict, or a dictionary with the model's and the
  optimizer's;
* checkpoints and run folders of Tessera.

Tensors are whole: a checkpoint needs its own size in memory. ``only_shapes`` gives tensors without memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.training.conversion.content import Content, ConversionError, State
from tessera.training.distributed.checkpoint.digests import INDEX
from tessera.training.distributed.checkpoint.reader import Piece, SavedTensors
from tessera.training.distributed.checkpoint.save_and_load import read_checkpoint, read_columns
from tessera.training.distributed.checkpoint.writer import PLAIN_FILE
from tessera.training.trainer.checkpoint_file import FORMAT, read_file

MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizers")
_NUMBERED = (
    "the states of the optimizer in {key!r} are numbered, as torch's own optimizers have them, so it is not "
    "known whose they are: save them by name (KeyedOptimizerWrapper), or give --only-model"
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Says what of a checkpoint is wanted.

    Attributes:
        model_key: the key of the model's state dict in a dictionary; empty: one of `MODEL_KEYS`.
        optimizer_key: the same of the optimizer's, one of `OPTIMIZER_KEYS`.
        only_model: whether optimizers are left out.
        take: the beginning of the names of the entries that are wanted; it is cut off.
        put: put before the names.
        only_shapes: whether tensors need no numbers.
    """

    model_key: str = ""
    optimizer_key: str = ""
    only_model: bool = False
    take: str = ""
    put: str = ""
    only_shapes: bool = False


def read_source(path: Path, choice: Choice) -> tuple[Content, bool]:
    """What a checkpoint holds, and whether it is Tessera's own by its format.

    Raises:
        ConversionError: it is not a checkpoint, is damaged, or what is wanted is not in it.
        CheckpointError: a checkpoint of Tessera's is damaged.
        OSError: it cannot be read.
    """
    if path.is_dir() and (path / PLAIN_FILE).exists():
        content, ours = _sharded(path, choice), True
    elif path.is_dir() and (path / INDEX).exists():
        content, ours = _distributed(path, choice), False
    elif path.is_dir():
        content, ours = _of_run(path, choice), True
    else:
        content, ours = _of_file(path, choice)
    return _taken(content, choice), ours


def _sharded(path: Path, choice: Choice) -> Content:
    """A folder that `save_checkpoint` wrote."""
    saved = read_checkpoint(path, only_model=choice.only_model)
    states = {} if choice.only_model else saved.optimizer["state"]
    left_out = _left_out(optimizer=choice.only_model, others=[*saved.extra_tensors, *saved.extra])
    return Content(model=saved.model, states=states, columns=read_columns(path), left_out=left_out)


def _of_run(path: Path, choice: Choice) -> Content:
    """The best checkpoint of a run folder."""
    from tessera.training.trained import best_checkpoint  # noqa: PLC0415 - loads the trainer

    found = best_checkpoint(path)
    return _sharded(found, choice) if found.is_dir() else _of_file(found, choice)[0]


def _of_file(path: Path, choice: Choice) -> tuple[Content, bool]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        raise ConversionError(
            f"{path} is refused: it is damaged or holds objects other than tensors and plain containers, and "
            "loading those could run code; tensors that are spread over ranks (ShardedTensor, DTensor) are "
            "saved with torch.distributed.checkpoint"
        ) from error
    except Exception as error:  # whatever zipfile and torch make of damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConversionError(f"{path} is not a file of torch.save: {reason}") from error
    if isinstance(content, dict) and content.get("format") == FORMAT:
        found = read_file(path)
        left_out = _left_out(optimizer=True, others=())
        return Content(model=found.model, left_out=left_out), True
    if not isinstance(content, Mapping):
        raise ConversionError(
            f"{path} holds a {type(content).__name__}; give a state dict, or a dictionary of state dicts"
        )
    return _of_tree(content, str(path), choice), False


def _distributed(path: Path, choice: Choice) -> Content:
    """A folder that `torch.distributed.checkpoint.save` wrote."""
    saved = SavedTensors(path)
    tree: dict[Any, Any] = {}
    tensors = {}
    for name in saved.names:
        tensor = torch.empty(saved.shape(name) or (), dtype=saved.dtype(name), device="meta")
        if not choice.only_shapes:
            tensor = saved.empty(name)
        tensors[name] = tensor
        _put(tree, saved.path(name), tensor)
    content = _of_tree(tree, str(path), choice)
    if not choice.only_shapes:
        wanted = {id(value) for value in _tensors(content)}
        saved.read(
            Piece(name, (0,) * tensor.dim(), tensor)
            for name, tensor in tensors.items()
            if id(tensor) in wanted
        )
    cut = {name: saved.cuts(name) for name in tensors}
    by_id = {id(tensor): name for name, tensor in tensors.items()}
    columns, both = {}, set()
    for entry, value in content.model.items():
        rows, starts = cut[by_id[id(value)]]
        if len(starts) > 1:
            columns[entry] = [*starts, value.size(1)]
            if rows > 1:
                both.add(entry)
    said = tuple(f"{name}: it is not a tensor" for name in saved.names_of_objects)
    return replace(content, columns=columns, cut_both_ways=frozenset(both),
                   left_out=content.left_out + said)  # fmt: skip


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Tensor) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _tensors(content: Content) -> list[Tensor]:
    of_states = [value for states in content.states.values() for value in states.values()]
    return [*content.model.values(), *(value for value in of_states if isinstance(value, Tensor))]


def _of_tree(tree: Mapping[Any, Any], name: str, choice: Choice) -> Content:
    """A state dict, or a dictionary with state dicts."""
    if all(isinstance(value, Tensor) for value in tree.values()) and not choice.model_key:
        return Content(model=dict(tree))
    model_key = _key(tree, choice.model_key, MODEL_KEYS, name, "--model-key")
    model = tree[model_key]
    if not isinstance(model, Mapping):
        raise ConversionError(f"{model_key!r} of {name} is not a state dict; give --model-key")
    not_tensors = [key for key, value in model.items() if not isinstance(value, Tensor)]
    if not_tensors:
        raise ConversionError(
            f"entry {not_tensors[0]!r} of {model_key!r} of {name} is a {type(model[not_tensors[0]]).__name__}; "
            "a model's state dict has tensors alone: give --model-key"
        )
    used = {model_key}
    states: dict[str, dict[str, State]] = {}
    left_out: tuple[str, ...] = ()
    if choice.optimizer_key or any(key in tree for key in OPTIMIZER_KEYS):
        optimizer_key = _key(tree, choice.optimizer_key, OPTIMIZER_KEYS, name, "--optimizer-key")
        used.add(optimizer_key)
        if choice.only_model:
            left_out = _left_out(optimizer=True, others=())
        else:
            states, left_out = _states(tree[optimizer_key], optimizer_key, name)
    others = [str(key) for key in tree if key not in used]
    return Content(
        model=dict(model),
        states=states,
        left_out=left_out + _left_out(optimizer=False, others=others),
    )


def _key(tree: Mapping[Any, Any], given: str, known: tuple[str, ...], name: str, flag: str) -> str:
    found = [given] if given else [key for key in known if key in tree]
    if not found or found[0] not in tree:
        asked = f"no {given!r}" if given else f"none of {', '.join(known)}"
        have = ", ".join(str(key) for key in list(tree)[:10])
        raise ConversionError(f"{name} has {asked}; give {flag} with one of its keys: {have}")
    return found[0]


def _states(
    optimizer: Any, key: str, name: str
) -> tuple[dict[str, dict[str, State]], tuple[str, ...]]:
    """The states by parameter, and what is left out beside them."""
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("state", {}), Mapping):
        raise ConversionError(
            f"{key!r} of {name} is not an optimizer's state dict; give --optimizer-key or --only-model"
        )
    states: dict[str, dict[str, State]] = {}
    for parameter, values in optimizer.get("state", {}).items():
        if not isinstance(parameter, str) or parameter.isdigit():
            raise ConversionError(_NUMBERED.format(key=key))
        states[parameter] = {
            str(state): value
            for state, value in values.items()
            if isinstance(value, Tensor | int | float)
        }
    groups = ("settings of the optimizers (param_groups): the program that loads has its own",)
    return states, groups if "param_groups" in optimizer else ()


def _left_out(*, optimizer: bool, others: Any) -> tuple[str, ...]:
    said = [f"{name}: it is not part of the model or its optimizer" for name in others]
    return (*(("states of optimizers",) if optimizer else ()), *said)


def _taken(content: Content, choice: Choice) -> Content:
    """The entries below ``choice.take``, without it, and with ``choice.put``."""
    if not choice.take and not choice.put:
        return content
    names = {
        name: choice.put + name.removeprefix(choice.take)
        for name in content.model
        if name.startswith(choice.take)
    }
    if not names:
        first = next(iter(content.model), "")
        raise ConversionError(
            f"--take {choice.take}: no entry's name begins with it; the first one is {first!r}"
        )
    left_out = [
        f"{name}: it is not below {choice.take}" for name in content.model if name not in names
    ]
    return replace(
        content,
        model={new: content.model[name] for name, new in names.items()},
        states={names[name]: states for name, states in content.states.items() if name in names},
        columns={names[name]: cut for name, cut in content.columns.items() if name in names},
        cut_both_ways=frozenset(names[name] for name in content.cut_both_ways & names.keys()),
        left_out=(*content.left_out, *left_out),
    )
