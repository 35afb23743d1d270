"""KeyedTensor: one dense vector per feature and sample, in one tensor."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor


class KeyedTensor:
    """Several named tensors side by side along ``key_dim``.

    What an `EmbeddingBagCollection` returns: ``values`` ``[B, sum of D]``, where key ``i`` owns
    ``length_per_key[i]`` columns.  May hold a ``torch.fx`` proxy.

    Args:
        keys: the names.
        length_per_key: columns per key.
        values: the tensor.
        key_dim: the dimension that the keys divide.

    Raises:
        ValueError: as many lengths as keys are needed, and they must add up to the width.
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
    ) -> None:
        if len(keys) != len(length_per_key):
            raise ValueError(f"{len(keys)} keys but {len(length_per_key)} lengths; give one each")
        width = sum(length_per_key)
        if isinstance(values, Tensor) and values.size(key_dim) != width:
            raise ValueError(
                f"length_per_key adds up to {width}, but values has {values.size(key_dim)} "
                f"entries along dimension {key_dim}"
            )
        self._keys: list[str] = list(keys)
        self._length_per_key: list[int] = list(length_per_key)
        self._offset_per_key: list[int] = [0, *accumulate(length_per_key)]
        self._values: Tensor = values
        self._key_dim: int = key_dim

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Put ``tensors`` (one per key) side by side along ``cat_dim``."""
        return KeyedTensor(
            keys=keys,
            length_per_key=[tensor.size(key_dim) for tensor in tensors],
            values=torch.cat(tensors, dim=cat_dim),
            key_dim=key_dim,
        )

    def keys(self) -> list[str]:
        """The names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """The tensor, ``[B, sum of D]``."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the keys divide."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Columns per key."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Each key's first column, then the width."""
        return self._offset_per_key

    def index_per_key(self) -> dict[str, int]:
        """Each key's place."""
        return {key: index for index, key in enumerate(self._keys)}

    def device(self) -> torch.device:
        """Where the values live."""
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        """One key's columns (a view).

        Raises:
            KeyError: there is no such key.
        """
        if key not in self._keys:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        index = self._keys.index(key)
        return self._values.narrow(
            self._key_dim, self._offset_per_key[index], self._length_per_key[index]
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Every key's columns (views) by its name."""
        return {key: self[key] for key in self._keys}

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """One tensor per group: the named columns side by side, from whichever tensor has them.

        Raises:
            KeyError: a group names a key that no tensor has.
        """
        owner = {key: tensor for tensor in keyed_tensors for key in tensor.index_per_key()}
        missing = [key for group in groups for key in group if key not in owner]
        if missing:
            raise KeyError(f"no key {missing[0]!r}; there are {sorted(owner)}")
        return [
            torch.cat([owner[key][key] for key in group], dim=owner[group[0]].key_dim())
            for group in groups
        ]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Like `regroup`, with a name for each group.

        Raises:
            KeyError: a group names a key that no tensor has.
            ValueError: as many names as groups are needed.
        """
        if len(groups) != len(keys):
            raise ValueError(f"{len(groups)} groups but {len(keys)} names; give one each")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> KeyedTensor:
        """The same columns on ``device``."""
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            self._values.to(device, non_blocking=non_blocking),
            self._key_dim,
        )

    def detach(self) -> KeyedTensor:
        """The same columns, cut off from the gradient graph."""
        return KeyedTensor(self._keys, self._length_per_key, self._values.detach(), self._key_dim)

    def __str__(self) -> str:
        if not isinstance(self._values, Tensor):
            return f"KeyedTensor({self._keys}, traced)"
        lines = [f"  {key!r}: {tensor.tolist()}" for key, tensor in self.to_dict().items()]
        return "\n".join(["KeyedTensor({", *lines, "})"])

    __repr__ = __str__
