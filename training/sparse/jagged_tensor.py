"""The sparse types, registered as nodes of ``torch.utils._pytree``: their tensors are the leaves.

Whatever maps over the tensors of a batch or an output (DistributedDataParallel, checkpointing of
activations, ``torch.func``) then finds them.  So the types are imported from here.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree

from tessera.training.sparse.conversion import ComputeJTDictToKJT, ComputeKJTToJTDict
from tessera.training.sparse.equality import jt_is_equal, kjt_is_equal
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
