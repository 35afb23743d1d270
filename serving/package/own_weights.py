"""A second instance of a scripted module: tables in common, everything else its own.

While one of the two answers, the other's weights can be replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.serving.package.torchscript import put_tensor


def with_own_weights(module: Any) -> Any:
    """A module of the same type, so that its code is neither compiled nor planned anew, with the same tables.

    Tables are its uint8 buffers; nobody may use ``module`` meanwhile, which is without them for a moment.

    Args:
        module: a scripted module, not frozen.

    Raises:
        RuntimeError: it holds something that cannot be copied.
    """
    tables = {path: one for path, one in _buffers(module).items() if one.dtype == torch.uint8}
    try:
        for path in tables:
            put_tensor(module, path, torch.empty(0, dtype=torch.uint8))
        made = copy.deepcopy(module)
    finally:
        for path, table in tables.items():
            put_tensor(module, path, table)
    for path, table in tables.items():
        put_tensor(made, path, table)
    return made


def own_bytes(module: Any) -> int:
    """What `with_own_weights` takes of memory: the bytes of all storages that are not tables'."""
    tensors = [*module.parameters(), *_buffers(module).values()]
    storages = [one.untyped_storage() for one in tensors if one.dtype != torch.uint8]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def lie_alike(
    memory: Mapping[str, Sequence[Tensor]], second: Mapping[str, Sequence[Tensor]]
) -> bool:
    """Whether a second instance has each record in as many places as the first; see `memory_of_records`.

    It has not where tensors shared a storage, which get storages of their own.
    """
    places, copied = ({name: len(found) for name, found in one.items()} for one in (memory, second))
    return places == copied


def _buffers(module: Any) -> dict[str, Tensor]:
    return dict(module.named_buffers(remove_duplicate=False))
