"""KeyedTensor: one dense vector per feature and sample, in one tensor."""

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know, flags by position among them

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.sparse.checks import values_are_unknown
from tessera.training.sparse.layout import place_of, running_sum
from tessera.training.sparse.outside_script import OutsideScript
from tessera.training.sparse.regrouping import Regrouping
from tessera.training.sparse.script_types import Device, is_scripting


class KeyedTensor(OutsideScript):
    """Several named tensors side by side along ``key_dim``.

    What an `EmbeddingBagCollection` returns: ``values`` ``[B, sum of D]``, where key ``i`` owns
    ``length_per_key[i]`` columns.  Compiles under ``torch.jit.script``; may hold a ``torch.fx``
    proxy.

    Args:
        keys: the names.
        length_per_key: columns per key.
        values: the tensor.
        key_dim: the dimension that the keys divide.
        offset_per_key: each key's first column, then the width, if the caller has it.
        index_per_key: each key's place, if the caller has it.

    Raises:
        ValueError: as many lengths as keys are needed, and they must add up to the width.
    """

    _worked_out = frozenset({"offset_per_key", "index_per_key"})

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        if not is_scripting():
            _check(keys, length_per_key, values, key_dim)
            keys, length_per_key = list(keys), list(length_per_key)
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key

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
        """Return the names in order."""
        return self._keys

    def values(self) -> Tensor:
        """Return the tensor, ``[B, sum of D]``."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension that the keys divide."""
        return self._key_dim

    def length_per_key(self) -> list[int]:
        """Return the number of columns per key."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the first column of each key, then the width."""
        offsets = self._offset_per_key
        if offsets is None:
            offsets = running_sum(self._length_per_key)
            self._offset_per_key = offsets
        return offsets

    def index_per_key(self) -> dict[str, int]:
        """Return the place of each key."""
        places = self._index_per_key
        if places is None:
            places = {key: index for index, key in enumerate(self._keys)}
            self._index_per_key = places
        return places

    def device(self) -> Device:
        """Return the device of the values."""
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        """Return the columns of one key (a view).

        Raises:
            KeyError: there is no such key.
        """
        index = place_of(self._keys, key)
        return self._values.narrow(
            self._key_dim, self.offset_per_key()[index], self._length_per_key[index]
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns of every key (views) by its name."""
        columns = torch.split_with_sizes(self._values, self._length_per_key, self._key_dim)
        return {key: columns[index] for index, key in enumerate(self._keys)}

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """One tensor per group: the named columns side by side, from whichever tensor has them.

        A group whose columns lie side by side already is a view of them.

        Raises:
            KeyError: a group names a key that no tensor has.
        """
        return _regroup(keyed_tensors, groups)

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
        regrouped = _regroup(keyed_tensors, groups)
        return {key: regrouped[index] for index, key in enumerate(keys)}

    def to(self, device: Device, non_blocking: bool = False) -> KeyedTensor:
        """Return the same columns on ``device``."""
        return self._with_values(self._values.to(device, non_blocking=non_blocking))

    def detach(self) -> KeyedTensor:
        """The same columns, cut off from the gradient graph."""
        return self._with_values(self._values.detach())

    def _with_values(self, values: Tensor) -> KeyedTensor:
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            values,
            self._key_dim,
            self._offset_per_key,
            self._index_per_key,
        )


def _check(keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> None:
    if len(keys) != len(length_per_key):
        raise ValueError(f"{len(keys)} keys but {len(length_per_key)} lengths; give one each")
    width = sum(length_per_key)
    if isinstance(values, Tensor) and values.size(key_dim) != width:
        raise ValueError(
            f"length_per_key adds up to {width}, but values has {values.size(key_dim)} "
            f"entries along dimension {key_dim}"
        )


def runs_of_groups(
    keyed_tensors: list[KeyedTensor], groups: list[list[str]]
) -> list[list[list[int]]]:
    """Where the columns of each group are: runs of neighbours, each a tensor, its first column and the columns' number.

    Raises:
        KeyError: a group names a key that no tensor has.
        ValueError: a group is empty.
    """
    owner: dict[str, int] = {}
    for index, keyed in enumerate(keyed_tensors):
        for key in keyed.keys():  # noqa: SIM118 - a list, and an awaited one has no __iter__
            owner[key] = index
    found: list[list[list[int]]] = []
    for group in groups:
        if len(group) == 0:
            raise ValueError("a group is empty; name at least one key in each")
        # Runs of keys that are neighbours already: tensor, first key, last key.
        runs: list[list[int]] = []
        for key in group:
            if key not in owner:
                raise KeyError(f"no key '{key}'; there are {sorted(owner.keys())}")
            source = owner[key]
            place = keyed_tensors[source].index_per_key()[key]
            if len(runs) > 0 and runs[-1][0] == source and runs[-1][2] + 1 == place:
                runs[-1][2] = place
            else:
                runs.append([source, place, place])
        columns: list[list[int]] = []
        for run in runs:
            offsets = keyed_tensors[run[0]].offset_per_key()
            columns.append([run[0], offsets[run[1]], offsets[run[2] + 1] - offsets[run[1]]])
        found.append(columns)
    return found


_MOST_REGROUPINGS = 256
_regroupings: dict[Any, Regrouping] = {}


def regrouping_of(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> Regrouping:
    """What puts the columns of tensors with these keys and lengths into these groups.

    Raises:
        KeyError, ValueError: see `runs_of_groups`.
    """
    keys = [keyed.keys() for keyed in keyed_tensors]
    lengths = [keyed.length_per_key() for keyed in keyed_tensors]
    dims = [keyed.key_dim() for keyed in keyed_tensors]
    alike = (*map(tuple, keys), *map(tuple, lengths), *dims, *map(tuple, groups))
    found = _regroupings.get(alike)
    if found is None:
        runs = runs_of_groups(keyed_tensors, groups)
        found = Regrouping(
            [list(own) for own in keys],
            [list(own) for own in lengths],
            dims,
            [list(group) for group in groups],
            runs,
        )
        if len(_regroupings) == _MOST_REGROUPINGS:
            _regroupings.pop(next(iter(_regroupings)), None)
        _regroupings[alike] = found
    return found


def _regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    if not is_scripting():
        values = [keyed.values() for keyed in keyed_tensors]
        if not values_are_unknown(*values):
            return regrouping_of(keyed_tensors, groups).of(values)
    regrouped: list[Tensor] = []
    for runs in runs_of_groups(keyed_tensors, groups):
        dim = keyed_tensors[runs[0][0]].key_dim()
        pieces: list[Tensor] = []
        for run in runs:
            pieces.append(keyed_tensors[run[0]].values().narrow(dim, run[1], run[2]))  # noqa: PERF401 - TorchScript compiles it
        regrouped.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim))
    return regrouped


# A group of tensors that are proxies themselves (not ours holding one) is one step of the graph.
torch.fx.wrap("_regroup")
