"""Checks that the sparse types share, and what tells a traced tensor from a real one.

Every check looks at real tensors only.  While a model is traced with ``torch.fx`` the fields of
a jagged tensor are proxies, whose values do not exist yet: `is_traced` tells, and the callers
then skip the check, so that nothing of the traced batch is frozen into the graph.  The same holds
under ``torch.export`` and ``torch.compile``, whose tensors have sizes and no values.

What a TorchRec program may build and never look up is let in and refused where it is used: fields
without lengths and offsets, weights in another number than the values, a key twice; after
``strict(False)`` (strictness.py) also fields that do not fit each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from tessera.training.sparse.strictness import is_strict


def is_traced(*values: object) -> bool:
    """Whether any of ``values`` is a ``torch.fx`` proxy."""
    for value in values:  # noqa: SIM110 - any() takes three times as long, and this is in every step
        if isinstance(value, Proxy):
            return True
    return False


def values_are_unknown(*tensors: object) -> bool:
    """Whether there are no values to check: proxies, or tensors that a compiler looks at."""
    return torch.compiler.is_compiling() or is_traced(*tensors)


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _check_index_vector(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; give a one-dimensional tensor, features "
            "one after the other"
        )
    if tensor.numel() and not _is_integer(tensor):
        raise ValueError(f"{name} has dtype {tensor.dtype}; give int32 or int64")


def check_jagged(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Check that the fields of a jagged tensor fit together.

    Tensors on an accelerator are checked by shape and dtype only: looking at their values would
    wait for the device.

    Raises:
        ValueError: a wrong shape or dtype, a negative length, or lengths/offsets that do not add up
            to the number of values.
    """
    if values_are_unknown(values, lengths, offsets):
        return
    if values.dim() == 0:
        raise ValueError("values is a scalar; give a tensor with one entry per id")
    total = values.size(0)
    if lengths is not None:
        _check_index_vector("lengths", lengths)
        if lengths.device.type == "cpu":
            _check_lengths(lengths, total)
    if offsets is not None:
        _check_index_vector("offsets", offsets)
        bags = max(offsets.numel() - 1, 0) if lengths is None else lengths.numel()
        if offsets.numel() != bags + 1:
            raise ValueError(
                f"offsets has {offsets.numel()} entries for {bags} bags; it has one more than bags"
            )
        if offsets.device.type == "cpu":
            _check_offsets(offsets, total)


def _check_lengths(lengths: Tensor, total: int) -> None:
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"lengths holds a negative length ({int(lengths.min())})")
    found = int(lengths.sum())
    if found != total:
        raise ValueError(f"lengths add up to {found} but there are {total} values")


def _check_offsets(offsets: Tensor, total: int) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != total:
        raise ValueError(
            f"offsets run from {first} to {last}; they must run from 0 to the number of values, "
            f"{total}"
        )
    if offsets.numel() > 1 and int((offsets[1:] - offsets[:-1]).min()) < 0:
        raise ValueError("offsets decrease somewhere; they are a running sum and cannot")


def check_weights(values: Tensor, weights: Tensor | None) -> None:
    """Refuse to look up, cut or send weights that are not one per value.

    Raises:
        ValueError: naming both numbers.
    """
    if weights is None or is_traced(values, weights):
        return
    if weights.size(0) != values.size(0):
        raise ValueError(
            f"weights has {weights.size(0)} entries but values has {values.size(0)}; give one per "
            "value"
        )


def check_use_of_bags(values: Tensor, offsets: Tensor) -> None:
    """Refuse bags that reach beyond the values, as far as they were not checked when they were built.

    Values behind the last bag are left alone: they may be room for larger batches.

    Raises:
        ValueError: naming both numbers.
    """
    if is_strict() or values_are_unknown(values, offsets) or offsets.device.type != "cpu":
        return
    if offsets.numel() and int(offsets[-1]) > values.size(0):
        raise ValueError(
            f"lengths add up to {int(offsets[-1])} but there are {values.size(0)} values"
        )


def tell_compiler_of_weights(values: Tensor, weights: Tensor | None) -> None:
    """Tell ``torch.export`` and ``torch.compile`` that a feature has as many weights as values."""
    if weights is not None and torch.compiler.is_compiling():
        torch._check(values.size(0) == weights.size(0))  # type: ignore[no-untyped-call] # noqa: SLF001 - documented, and untyped


def check_id_dtype(ids: Tensor) -> None:
    """Refuse values that are not ids.

    Raises:
        ValueError: the values are not int32 or int64.
    """
    if not is_traced(ids) and not _is_integer(ids):
        raise ValueError(f"values has dtype {ids.dtype}; ids are int32 or int64")


def check_as_many(values: Tensor, old: Tensor) -> None:
    """Refuse values in another number than the ones that they take the place of.

    Raises:
        ValueError: naming both numbers.
    """
    if not is_traced(values, old) and values.size(0) != old.size(0):
        raise ValueError(f"values has {values.size(0)} ids, not {old.size(0)}")


def as_lists(strides: Any) -> list[list[int]] | None:
    """Strides per key and rank as lists, from lists or from a tensor ``[F, ranks]``."""
    if isinstance(strides, Tensor):
        strides = strides.tolist()
    return None if strides is None else [list(per_rank) for per_rank in strides]


def check_keyed_jagged(  # noqa: PLR0917 - the constructor's fields, in its order
    keys: list[str],
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
    strides: tuple[list[list[int]] | None, list[int] | None],
) -> None:
    """Check the keys, that the tensors fit together, and the number of bags.

    ``strides`` are the bags per key and rank, and the bags per key, if they were given.

    Raises:
        ValueError: what `check_jagged` refuses, or a number of bags that does not fit the keys.
    """
    check_jagged(values, lengths, offsets)
    per_rank, per_key = strides
    if per_rank is not None:
        per_key = [sum(own) for own in per_rank]
    _check_bags(keys, lengths, offsets, stride, per_key)


def _check_bags(
    keys: list[str],
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
    per_key: list[int] | None,
) -> None:
    if values_are_unknown(lengths, offsets):
        return
    name = "lengths" if lengths is not None else "offsets"
    if lengths is not None:
        bags = lengths.numel()
    elif offsets is not None:
        bags = offsets.numel() - 1
    else:
        return
    if per_key is not None:
        if len(per_key) != len(keys) or sum(per_key) != bags:
            raise ValueError(
                f"{name} describes {bags} bags of {len(keys)} keys, but the strides per key are "
                f"{per_key}"
            )
    elif stride is not None:
        if bags != len(keys) * stride:
            raise ValueError(
                f"{name} describes {bags} bags, but {len(keys)} keys with stride {stride} make "
                f"{len(keys) * stride}"
            )
    elif bags % max(len(keys), 1) or (not keys and bags):
        raise ValueError(
            f"{name} describes {bags} bags, which do not divide evenly among {len(keys)} "
            "keys; give one bag per key and sample, feature-major"
        )


def check_key_bounds(
    keys: list[str],
    length_per_key: list[int] | None,
    offset_per_key: list[int] | None,
    inverse_indices: tuple[list[str], Tensor] | None,
) -> None:
    """Refuse what says too little or too much about the keys.

    Raises:
        ValueError: naming the field and both numbers.
    """
    for name, field, needed in (
        ("length_per_key", length_per_key, len(keys)),
        ("offset_per_key", offset_per_key, len(keys) + 1),
    ):
        if field is not None and len(field) != needed:
            raise ValueError(f"{name} has {len(field)} entries; {len(keys)} keys need {needed}")
    if inverse_indices is None:
        return
    names, places = inverse_indices
    if not is_traced(places) and (places.dim() != 2 or places.size(0) != len(names)):
        raise ValueError(
            f"inverse_indices has shape {tuple(places.shape)} for {len(names)} keys; give "
            "[keys, samples]"
        )
