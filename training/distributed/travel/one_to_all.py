"""One process that serves several devices: ids out to the devices, vectors back to one.

Copies only, no communication; on ``cpu`` all shards share one memory and nothing is copied.
Legend: ``W`` devices, ``B`` samples, ``D_w`` columns of device ``w``, ``N_w`` its ids.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.environment import rank_device
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

T = TypeVar("T", Tensor, KeyedJaggedTensor)


def _to(given: T, device: torch.device) -> T:
    # A traced copy would be a step of every CPU graph that does nothing.
    return given if device.type == "cpu" else given.to(device, non_blocking=True)


class KJTOneToAll(nn.Module):
    """Sends every device its features.

    Args:
        splits: keys per device, in order.
        world_size: ``W``.
        device: the devices' type; None: ``cuda`` where there is one, else ``cpu``.

    Raises:
        ValueError: as many splits as devices are needed.
    """

    def __init__(
        self, splits: list[int], world_size: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(splits) != world_size:
            raise ValueError(f"splits has {len(splits)} entries for {world_size} devices")
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._splits = list(splits)
        self._devices = [rank_device(device.type, rank) for rank in range(world_size)]

    def forward(self, kjt: KeyedJaggedTensor) -> KJTList:
        """Cut ``kjt`` by keys and copy each part to its device."""
        parts = kjt.split(self._splits)
        return KJTList([_to(parts[place], device) for place, device in enumerate(self._devices)])


class _AllToOne(nn.Module):
    def __init__(self, device: torch.device, world_size: int) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._world_size = world_size

    def set_device(self, device_str: str) -> None:
        """Bring the vectors to another device from now on."""
        self._device = torch.device(device_str)

    def _gathered(self, tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors) != self._world_size:
            raise ValueError(f"{len(tensors)} tensors of {self._world_size} devices")
        return [_to(tensor, self._device) for tensor in tensors]


class EmbeddingsAllToOne(_AllToOne):
    """Puts the vectors of all devices side by side on one.

    Args:
        device: where they go.
        world_size: ``W``.
        cat_dim: 1 for pooled vectors, 0 for unpooled ones.
    """

    def __init__(self, device: torch.device, world_size: int, cat_dim: int) -> None:
        super().__init__(device, world_size)
        self._cat_dim = cat_dim

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """``[B, D_w]`` each to ``[B, sum of D_w]``, or ``[N_w, D]`` to ``[sum of N_w, D]``.

        Raises:
            ValueError: not one tensor per device.
        """
        gathered = self._gathered(tensors)
        return gathered[0] if len(gathered) == 1 else torch.cat(gathered, dim=self._cat_dim)


class EmbeddingsAllToOneReduce(_AllToOne):
    """Adds up the vectors of all devices on one, in the devices' order.

    The arguments and errors are those of `EmbeddingsAllToOne`.
    """

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """Add the devices' vectors, ``[B, D]`` each."""
        first, *rest = self._gathered(tensors)
        for tensor in rest:
            first = first + tensor
        return first


class SeqEmbeddingsAllToOne(_AllToOne):
    """Brings the unpooled vectors of all devices to one, apart as they are.

    The arguments and errors are those of `EmbeddingsAllToOne`.
    """

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Move the devices' vectors, ``[N_w, D]`` each, to one device."""
        return self._gathered(tensors)
