"""Keyed tensors as groups of columns, in a module."""

from __future__ import annotations

from torch import Tensor, nn

from tessera.training.modules.embedding_configs import DataType, data_type_to_dtype
from tessera.training.sparse.jagged_tensor import KeyedTensor


class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` with its groups, as a module.

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

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """The columns of each group side by side, ``[B, columns]``, by its name.

        Raises:
            KeyError: a group names a key that no tensor has.
        """
        regrouped = KeyedTensor.regroup(keyed_tensors, self._groups)
        if self._dtype is not None:
            regrouped = [columns.to(self._dtype) for columns in regrouped]
        return {key: regrouped[place] for place, key in enumerate(self._keys)}
