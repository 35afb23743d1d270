"""Put a package's tensors on their devices.

Every tensor of shard ``k`` has `SHARD` + ``k`` in its name; all others go to the first device.  The
graph names no device: it moves what it is given beside the tensors that it works with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from tessera.serving.package.torchscript import put_tensor

SHARD = "tessera_shard_"
"""What the names of shard ``k``'s tensors contain, before the number ``k``."""

_SHARD = re.compile(rf"{SHARD}(\d+)")


def shard_of(name: str) -> int:
    """The shard that the tensor called ``name`` belongs to; 0 for those of no shard."""
    found = _SHARD.search(name)
    return 0 if found is None else int(found.group(1))


def on_host(devices: Sequence[str]) -> bool:
    """Whether all tensors stay in the host's memory, where shards have these devices."""
    return set(devices) == {"cpu"}


def default_devices(kind: str, shards: int) -> list[str]:
    """One device per shard: the first GPUs there are, in turns where they are fewer.

    Args:
        kind: ``cpu`` or ``cuda``.
        shards: how many.

    Raises:
        ValueError: this machine has no such device.
    """
    if kind == "cpu":
        return ["cpu"] * shards
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        raise ValueError(
            "torch sees no CUDA device here; install a CUDA build of torch and check nvidia-smi, "
            "or package the model with --device cpu"
        )
    return [f"cuda:{shard % found}" for shard in range(shards)]


def bytes_by_device(module: Any) -> dict[str, int]:
    """How many bytes of a scripted module's tables lie on each device.

    Tables, and nothing else in a package, are kept as bytes.
    """
    found: dict[str, int] = {}
    for tensor in module.buffers():
        if tensor.dtype == torch.uint8:
            device = str(tensor.device)
            found[device] = found.get(device, 0) + tensor.nbytes
    return found


def place(module: Any, devices: Sequence[str]) -> None:
    """Move each tensor of a scripted module, one after the other, to its shard's device.

    Args:
        module: a `torch.jit.ScriptModule`, changed in place.
        devices: of shard 0, 1, ...
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        device = devices[shard_of(name)]
        if tensor.device != torch.device(device):
            put_tensor(module, name, tensor.to(device))
