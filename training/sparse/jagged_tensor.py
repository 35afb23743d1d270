"""The sparse types, with their comparison and modules that take them apart in traced models.

Importing them from here makes them nodes of ``torch.utils._pytree``, too (see `leaves`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed import KeyedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor
from tessera.training.sparse.leaves import register_leaves

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
    "regroup_kts",
]


class ComputeKJTToJTDict(nn.Module):
    """A keyed jagged tensor as the bags of each feature."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags of every feature by its name."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """The bags of each feature as one keyed jagged tensor."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One feature per entry.

        Raises:
            ValueError: no entries, or weights in some only.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup` as a function.

    Raises:
        KeyError: a group names a key that no tensor has.
    """
    return KeyedTensor.regroup(keyed_tensors, groups)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Whether values, weights and lengths are the same."""
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return (
        _same(jt_1.values(), jt_2.values())
        and _same(jt_1.weights_or_none(), jt_2.weights_or_none())
        and torch.equal(jt_1.lengths().long(), jt_2.lengths().long())
    )


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Whether both have the same keys, in any order, with the same bags and inverse indices."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    if sorted(kjt_1.keys()) != sorted(kjt_2.keys()):
        return False
    inverse_1, inverse_2 = kjt_1.inverse_indices_or_none(), kjt_2.inverse_indices_or_none()
    if (inverse_1 is None) != (inverse_2 is None):
        return False
    if inverse_1 is not None and inverse_2 is not None:
        places = {key: inverse_2[1][index] for index, key in enumerate(inverse_2[0])}
        if sorted(inverse_1[0]) != sorted(places):
            return False
        if not all(_same(inverse_1[1][i], places[key]) for i, key in enumerate(inverse_1[0])):
            return False
    bags_1, bags_2 = kjt_1.to_dict(), kjt_2.to_dict()
    return all(jt_is_equal(bags_1[key], bags_2[key]) for key in bags_1)


register_leaves()
