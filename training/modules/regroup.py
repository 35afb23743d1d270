"""Keyed tensors as groups of columns, in a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.fbgemm import load_sparse_operators
from tessera.training.modules.embedding_configs import DataType, data_type_to_dtype
from tessera.training.sparse.checks import is_traced, values_are_unknown
from tessera.training.sparse.jagged_tensor import KeyedTensor
from tessera.training.sparse.keyed import runs_of_groups
from tessera.training.sparse.script_types import is_scripting

_OPERATOR_FROM = 9
"""So many runs of columns make FBGEMM's operator, one kernel, faster than views and ``torch.cat`` on a GPU."""


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
        self._runs: Any = None
        self._operator: Any = None
        self._operator_device: Any = None
        self._by_kernel = False

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
            self._runs, self._operator = runs_of_groups(keyed_tensors, self._groups), None
            self._seen = [(list(keys), list(lengths), dim) for keys, lengths, dim in seen]
            self._by_kernel = sum(map(len, self._runs)) >= _OPERATOR_FROM
        first = values[0]
        if not (self._by_kernel and first.is_cuda):
            return self._by_views(values)
        dtype = first.dtype
        for own in values:
            if own.dim() != 2 or own.dtype != dtype:
                return self._by_views(values)
        if self._operator is None or self._operator_device != first.device:
            self._operator = arguments_of_operator(first, keyed_tensors, self._groups)
            self._operator_device = first.device
            # They are copied there by the current stream, and used by any stream.
            torch.cuda.synchronize(first.device)
        regrouped: list[Tensor] = torch.ops.fbgemm.permute_multi_embedding(values, *self._operator)
        return regrouped

    @torch.jit.unused
    def _by_views(self, values: list[Tensor]) -> list[Tensor]:
        """The groups by views of their columns, which are put together where they are not neighbours."""
        regrouped = []
        for runs in self._runs:
            dim = self._seen[runs[0][0]][2]
            pieces = [values[source].narrow(dim, first, width) for source, first, width in runs]
            regrouped.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=dim))
        return regrouped


def arguments_of_operator(
    values: Tensor, keyed_tensors: list[KeyedTensor], groups: list[list[str]]
) -> Any:
    """What FBGEMM's ``permute_multi_embedding`` takes besides values ``[B, columns]``, on the device of ``values``."""
    load_sparse_operators()
    keys = [keyed.keys() for keyed in keyed_tensors]
    lengths = [keyed.length_per_key() for keyed in keyed_tensors]
    return torch.ops.fbgemm.kt_regroup_arguments(values, keys, lengths, groups)
