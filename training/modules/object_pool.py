"""What pools have in common: rows that programs write and read by number, without gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


class ObjectPool(ABC, nn.Module, Generic[T]):
    """The base class of pools of ``T``."""

    @abstractmethod
    def lookup(self, ids: Tensor) -> T:
        """The rows of ``ids``, an integer tensor ``[N]``."""

    @abstractmethod
    def update(self, ids: Tensor, values: T) -> None:
        """Write the rows of ``ids``; of an id that is there several times the last one counts."""

    @property
    @abstractmethod
    def pool_size(self) -> int:
        """How many rows there are."""

    def _check_ids(self, ids: Tensor) -> Tensor:
        """``ids`` as int64.

        Raises:
            ValueError: they are not integers, or not ``[N]``.
            IndexError: one is not a row (ids on the CPU).
        """
        if ids.dtype not in {torch.int32, torch.int64} or ids.dim() != 1:
            raise ValueError(
                f"ids are {ids.dtype} of shape {list(ids.shape)}; give int32 or int64 of shape [N]"
            )
        if ids.device.type == "cpu" and len(ids):
            low, high = map(int, torch.aminmax(ids))
            rows = self.pool_size
            if low < 0 or high >= rows:
                wrong = low if low < 0 else high
                raise IndexError(f"id {wrong} is not one of the pool's {rows} rows")
        return ids.long()

    def _last_places(self, ids: Tensor) -> Tensor:
        """The places in ``ids`` of the last of each id, in order; int64."""
        places = torch.arange(len(ids), device=ids.device)
        # Only what is at an id is written and read: of a large pool that is a small part.
        last = places.new_empty(self.pool_size)
        last.scatter_reduce_(0, ids, places, "amax", include_self=False)
        return (last.index_select(0, ids) == places).nonzero().squeeze(1)
