"""The sparse types, registered as nodes of ``torch.utils._pytree``: their tensors are the leaves.

With them are their comparison, and modules that take them apart in traced models.  Whatever maps over the tensors of a batch or an output (DistributedDataParallel, checkpointing of
activations, ``torch.func``) then finds them.  So the types are imported from here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed import KeyedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "jt_is_equal",
    "kjt_is_equal",
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


def _flatten_jagged(jagged: JaggedTensor) -> tuple[list[Any], None]:
    fields = [jagged.values(), jagged.weights_or_none()]
    return [*fields, jagged.lengths_or_none(), jagged.offsets_or_none()], None


def _unflatten_jagged(leaves: Any, _: None) -> JaggedTensor:
    values, weights, lengths, offsets = leaves
    return JaggedTensor(values, weights, lengths, offsets, validate=False)


def _flatten_keyed_jagged(keyed: KeyedJaggedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    inverse = keyed.inverse_indices_or_none()
    strides = keyed.stride_per_key_per_rank()
    leaves = [
        keyed.values(),
        keyed.weights_or_none(),
        keyed.lengths_or_none(),
        keyed.offsets_or_none(),
        None if inverse is None else inverse[1],
    ]
    varying = keyed.variable_stride_per_key()
    context = (
        tuple(keyed.keys()),
        keyed.stride(),
        tuple(tuple(own) for own in strides) if varying else None,
        None if inverse is None else tuple(inverse[0]),
    )
    return leaves, context


def _unflatten_keyed_jagged(leaves: Any, context: tuple[Any, ...]) -> KeyedJaggedTensor:
    keys, stride, strides, inverse_keys = context
    values, weights, lengths, offsets, inverse = leaves
    return KeyedJaggedTensor(
        list(keys),
        values,
        weights,
        lengths,
        offsets,
        stride,
        None if strides is None else [list(own) for own in strides],
        inverse_indices=None if inverse is None else (list(inverse_keys), inverse),
        validate=False,
    )


def _flatten_keyed(keyed: KeyedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    context = (tuple(keyed.keys()), tuple(keyed.length_per_key()), keyed.key_dim())
    return [keyed.values()], context


def _unflatten_keyed(leaves: Any, context: tuple[Any, ...]) -> KeyedTensor:
    keys, length_per_key, key_dim = context
    (values,) = leaves
    return KeyedTensor(list(keys), list(length_per_key), values, key_dim)


for kind, flatten, unflatten in (
    (JaggedTensor, _flatten_jagged, _unflatten_jagged),
    (KeyedJaggedTensor, _flatten_keyed_jagged, _unflatten_keyed_jagged),
    (KeyedTensor, _flatten_keyed, _unflatten_keyed),
):
    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"tessera.training.{kind.__name__}",
    )
