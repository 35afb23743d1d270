"""The sparse types as nodes of ``torch.utils._pytree``: their tensors are the leaves.

Whatever maps over the tensors of a batch or an output (DistributedDataParallel, checkpointing of
activations, ``torch.func``, ``torch.export``) then finds them.  The leaves, by the names of the
fields that hold them:

* JaggedTensor: ``values``, ``weights``, ``lengths``, ``offsets``;
* KeyedJaggedTensor: these, ``stride_per_key_per_rank`` (int64 ``[keys, ranks]``) and
  ``inverse_indices`` (without their keys);
* KeyedTensor: ``values``.

A leaf that is not there is None.  Names, and the widths of a KeyedTensor, are the node's context; the
batch size is not, so that an exported model takes batches of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree

from tessera.training.sparse.checks import as_lists, is_traced
from tessera.training.sparse.jagged import JaggedTensor
from tessera.training.sparse.keyed import KeyedTensor
from tessera.training.sparse.keyed_jagged import KeyedJaggedTensor

_JAGGED = ("_values", "_weights", "_lengths", "_offsets")
_KEYED_JAGGED = (*_JAGGED, "_stride_per_key_per_rank", "_inverse_indices")
_KEYED = ("_values",)


def _flatten_jagged(jagged: JaggedTensor) -> tuple[list[Any], None]:
    fields = [jagged.values(), jagged.weights_or_none()]
    return [*fields, jagged.lengths_or_none(), jagged.offsets_or_none()], None


def _unflatten_jagged(leaves: Any, _: None) -> JaggedTensor:
    values, weights, lengths, offsets = leaves
    return JaggedTensor(values, weights, lengths, offsets, validate=False)


def _flatten_keyed_jagged(keyed: KeyedJaggedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    inverse = keyed.inverse_indices_or_none()
    lengths, offsets = keyed.lengths_or_none(), keyed.offsets_or_none()
    strides: Any = None
    if keyed.variable_stride_per_key():
        strides = keyed.stride_per_key_per_rank()
        if not is_traced(*(number for own in strides for number in own)):
            strides = torch.tensor(strides, dtype=torch.int64)
    leaves = [
        keyed.values(),
        keyed.weights_or_none(),
        lengths,
        offsets,
        strides,
        None if inverse is None else inverse[1],
    ]
    keys = tuple(keyed.keys())
    # Elsewhere the batch size follows from the leaves.
    alone = not keys or (lengths is None and offsets is None)
    context = (
        keys,
        keyed.stride() if alone else None,
        None if inverse is None else tuple(inverse[0]),
    )
    return leaves, context


def _unflatten_keyed_jagged(leaves: Any, context: tuple[Any, ...]) -> KeyedJaggedTensor:
    keys, stride, inverse_keys = context
    values, weights, lengths, offsets, strides, inverse = leaves
    return KeyedJaggedTensor(
        list(keys),
        values,
        weights,
        lengths,
        offsets,
        stride,
        # What a tree was mapped to need not be numbers.
        as_lists(strides) if isinstance(strides, Tensor) else strides,
        inverse_indices=None if inverse_keys is None else (list(inverse_keys), inverse),
        validate=False,
    )


def _flatten_keyed(keyed: KeyedTensor) -> tuple[list[Any], tuple[Any, ...]]:
    context = (tuple(keyed.keys()), tuple(keyed.length_per_key()), keyed.key_dim())
    return [keyed.values()], context


def _unflatten_keyed(leaves: Any, context: tuple[Any, ...]) -> KeyedTensor:
    keys, length_per_key, key_dim = context
    (values,) = leaves
    return KeyedTensor(list(keys), list(length_per_key), values, key_dim)


def _with_keys(
    flatten: Callable[[Any], tuple[list[Any], Any]], names: Sequence[str]
) -> Callable[[Any], tuple[list[tuple[Any, Any]], Any]]:
    def flattened(sparse: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(sparse)
        keys = [_pytree.GetAttrKey(name) for name in names]
        return list(zip(keys, leaves, strict=True)), context

    return flattened


def _jagged_by_spec(jagged: JaggedTensor, _: _pytree.TreeSpec) -> list[Any]:
    return _flatten_jagged(jagged)[0]


def _keyed_jagged_by_spec(keyed: KeyedJaggedTensor, spec: _pytree.TreeSpec) -> list[Any]:
    keys = list(spec.context[0])
    if keyed.keys() != keys:
        places = keyed.index_per_key()
        _refuse_missing(keys, places)
        keyed = keyed.permute([places[key] for key in keys])
    return _flatten_keyed_jagged(keyed)[0]


def _keyed_by_spec(keyed: KeyedTensor, spec: _pytree.TreeSpec) -> list[Any]:
    keys, widths, key_dim = spec.context
    if tuple(keyed.keys()) == keys and tuple(keyed.length_per_key()) == widths:
        return [keyed.values()]
    places = keyed.index_per_key()
    _refuse_missing(keys, places)
    found = tuple(keyed.length_per_key()[places[key]] for key in keys)
    if found != widths or keyed.key_dim() != key_dim:
        raise ValueError(
            f"a KeyedTensor has columns {dict(zip(keys, found, strict=True))} along dimension "
            f"{keyed.key_dim()}; the graph was made for {widths} along dimension {key_dim}"
        )
    return [torch.cat([keyed[key] for key in keys], dim=key_dim)]


def _refuse_missing(keys: Sequence[str], places: dict[str, int]) -> None:
    for key in keys:
        if key not in places:
            raise KeyError(
                f"no key '{key}', which the graph was made for; there are {list(places)}"
            )


def _lists(context: Any) -> Any:
    """Tuples as lists, which JSON has."""
    return [_lists(part) for part in context] if isinstance(context, (tuple, list)) else context


def _tuples(context: Any) -> Any:
    return tuple(_tuples(part) for part in context) if isinstance(context, list) else context


def register_leaves() -> None:
    """Make the sparse types nodes of both of torch's kinds of trees.

    In graphs that ``torch.fx`` makes of trees, keys may come in another order than the one that a
    graph was made for, and there may be others beside them.
    """
    for kind, names, flatten, unflatten, by_spec in (
        (JaggedTensor, _JAGGED, _flatten_jagged, _unflatten_jagged, _jagged_by_spec),
        (
            KeyedJaggedTensor,
            _KEYED_JAGGED,
            _flatten_keyed_jagged,
            _unflatten_keyed_jagged,
            _keyed_jagged_by_spec,
        ),
        (KeyedTensor, _KEYED, _flatten_keyed, _unflatten_keyed, _keyed_by_spec),
    ):
        _pytree.register_pytree_node(
            kind,
            flatten,
            unflatten,
            serialized_type_name=f"tessera.training.{kind.__name__}",
            to_dumpable_context=_lists,
            from_dumpable_context=_tuples,
            flatten_with_keys_fn=_with_keys(flatten, names),
        )
        fx_pytree.register_pytree_flatten_spec(kind, by_spec)
