"""Keyed tensors as groups of columns, in a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.modules.embedding_configs import DataType, data_type_to_dtype
from tessera.training.sparse.checks import is_traced, values_are_unknown
from tessera.training.sparse.jagged_tensor import KeyedTensor
from tessera.training.sparse.keyed import regrouping_of
from tessera.training.sparse.script_types import is_scripting


class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` with its groups, as a module.

    It looks up once where the columns of the groups are, and again when tensors of other keys or lengths come.

    Args:
        groups: the keys of each group.
        keys: the groups' names.
        emb_dtype: the type of the groups' numbers; None: as they are.

    Raises:
        ValueError: as many names as groups are needed.
    """

    def __init__(
        self, groups: list[list[str]], keys: list[str], emb_dtype: DataType | None = None
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"{len(groups)} groups but {len(keys)} names; give one each")
        self._groups = groups
        self._keys = keys
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)
        self._seen: Any = None
        self._regrouping: Any = None

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """The columns of each group side by side, ``[B, columns]``, by its name.

        Raises:
            KeyError: a group names a key that no tensor has.
        """
        if is_scripting():
            regrouped = KeyedTensor.regroup(keyed_tensors, self._groups)
        else:
            regrouped = self._regrouped(keyed_tensors)
        if self._dtype is not None:
            regrouped = [columns.to(self._dtype) for columns in regrouped]
        return {key: regrouped[place] for place, key in enumerate(self._keys)}

    @torch.jit.unused
    def _regrouped(self, keyed_tensors: list[KeyedTensor]) -> list[Tensor]:
        if is_traced(keyed_tensors):  # the list itself: what is in it is not known
            return KeyedTensor.regroup(keyed_tensors, self._groups)
        values = [keyed.values() for keyed in keyed_tensors]
        if values_are_unknown(*values):
            return KeyedTensor.regroup(keyed_tensors, self._groups)
        seen = [(keyed.keys(), keyed.length_per_key(), keyed.key_dim()) for keyed in keyed_tensors]
        if seen != self._seen:
            self._regrouping = regrouping_of(keyed_tensors, self._groups)
            self._seen = [(list(keys), list(lengths), dim) for keys, lengths, dim in seen]
        regrouped: list[Tensor] = self._regrouping.of(values)
        return regrouped
