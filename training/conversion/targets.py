"""Writing converted checkpoints: whole, or not at all.

A name that ends in ``.pt`` or ``.pth`` is a file of ``torch.save``: the model's state dict, or
``{"model": ..., "optimizer": {"state": ...}}`` where there are states.  Any other name is a folder of
``torch.distributed.checkpoint``, for Tessera one that `load_checkpoint` loads.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tessera.durable import replacing, sync
from tessera.training.conversion.content import Content
from tessera.training.conversion.convert import Library
from tessera.training.distributed.checkpoint.basics import partial_path
from tessera.training.distributed.checkpoint.layout import MODEL, OPTIMIZER
from tessera.training.distributed.checkpoint.layout import Content as Named
from tessera.training.distributed.checkpoint.writer import write

FILES = (".pt", ".pth")


def write_target(path: Path, content: Content, library: Library) -> None:
    """Write a checkpoint for ``library``; what has the name already is replaced.

    Raises:
        CheckpointError: it cannot be written.
        OSError: the same.
    """
    if path.suffix in FILES:
        with replacing(path) as stream:
            torch.save(_tree(content) if content.states else content.model, stream)
    elif library == "tessera":
        write(path, _named(content), {}, None)
    else:
        _write_folder(path, _tree(content))


def _tree(content: Content) -> dict[str, Any]:
    optimizer = {"optimizer": {"state": content.states}} if content.states else {}
    return {"model": content.model, **optimizer}


def _named(content: Content) -> Named:
    """As `save_checkpoint` names the same."""
    named = Named({MODEL + name: value for name, value in content.model.items()}, {}, {}, None)
    for parameter, states in content.states.items():
        for key, value in states.items():
            name = f"{OPTIMIZER}{parameter}.{key}"
            if isinstance(value, Tensor):
                named.tensors[name] = value
            else:
                named.numbers[name] = value
    named.columns.update(content.columns)
    return named


def _write_folder(path: Path, tree: dict[str, Any]) -> None:
    partial = partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save(tree, storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
