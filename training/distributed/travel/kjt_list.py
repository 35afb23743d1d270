"""Lists of features: the inputs of sharded modules' lookups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

Part = TypeVar("Part", bound=Multistreamable)


class _Listed(Multistreamable, Generic[Part]):
    """Acts as the list that `_parts` gives."""

    @abstractmethod
    def _parts(self) -> list[Part]: ...

    def __len__(self) -> int:
        return len(self._parts())

    def __getitem__(self, key: int) -> Part:
        return self._parts()[key]

    def __setitem__(self, key: int, item: Part) -> None:
        self._parts()[key] = item

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses every tensor."""
        for part in self._parts():
            part.record_stream(stream)


class KJTList(_Listed[KeyedJaggedTensor]):
    """The input of a sharded module's lookups, one tensor per lookup.

    Args:
        features: one tensor per sharding type.
    """

    def __init__(self, features: list[KeyedJaggedTensor]) -> None:
        self.features = features

    def _parts(self) -> list[KeyedJaggedTensor]:
        return self.features


class ListOfKJTList(_Listed[KJTList]):
    """Several `KJTList`, one per sharding type, each with one tensor per device."""

    def __init__(self, features: list[KJTList]) -> None:
        self.features_list = features

    def _parts(self) -> list[KJTList]:
        return self.features_list
