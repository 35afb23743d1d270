"""The memory in which a module holds the records of its package, on whatever device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def memory_of_records(
    module: Any, tensor_records: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, list[Tensor]]:
    """By record ``data/N``, the memory ``[bytes]`` uint8 that the module's tensors of it share.

    Several where they have memory of their own, as on GPUs.  A record is left out that the module holds in another
    form.

    Args:
        module: a scripted module, not frozen.
        tensor_records: by the name of a parameter or buffer, its record.
        sizes: bytes of each record.
    """
    tensors: dict[str, Tensor] = dict(
        [*module.named_parameters(), *module.named_buffers(remove_duplicate=False)]
    )
    found: dict[str, dict[int, Tensor]] = {}
    for name, record in tensor_records.items():
        memory = _storage_of(tensors[name])
        found.setdefault(record, {})[memory.data_ptr()] = memory
    return {
        record: list(places.values())
        for record, places in found.items()
        if all(place.numel() == sizes[record] for place in places.values())
    }


def _storage_of(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.detach().untyped_storage())
