"""Lists of features: the inputs of sharded modules' lookups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

Part = TypeVar("Part", bound=Multistreamable)


class _Listed(Multistreamable, Generic[Part]):
    """Acts as the list that it is given."""

    def __init__(self, features: list[Part]) -> None:
        self._parts = features

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, key: int) -> Part:
        return self._parts[key]

    def __setitem__(self, key: int, item: Part) -> None:
        self._parts[key] = item

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)


class KJTList(_Listed[KeyedJaggedTensor]):
    """The input of a sharded module's lookups, one tensor per lookup.

    Args:
        features: one tensor per sharding.
    """

    @property
    def features(self) -> list[KeyedJaggedTensor]:
        """Return the list that was given."""
        return self._parts


class ListOfKJTList(_Listed[KJTList]):
    """Several `KJTList`, one per sharding, each with one tensor per device."""

    @property
    def features_list(self) -> list[KJTList]:
        """Return the list that was given."""
        return self._parts
