"""What pools have in common: rows that programs write and read by number, without gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

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
