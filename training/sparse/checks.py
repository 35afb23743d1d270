"""Checks and small tensor functions that the sparse types share.

Every check looks at real tensors only.  While a model is traced with ``torch.fx`` the fields of
a jagged tensor are proxies, whose values do not exist yet: `is_traced` tells, and the callers
then skip the check, so that nothing of the traced batch is frozen into the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Proxy


def is_traced(*tensors: Tensor | None) -> bool:
    """Whether any of ``tensors`` is a ``torch.fx`` proxy."""
    return any(isinstance(tensor, Proxy) for tensor in tensors)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """``[n]`` lengths to ``[n + 1]`` int64 offsets: 0, then the running sum."""
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int64), (1, 0))


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """``[n + 1]`` offsets to ``[n]`` lengths of the same dtype."""
    return offsets[1:] - offsets[:-1]


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64)


def _check_index_vector(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; give a one-dimensional tensor, features "
            "one after the other"
        )
    if not _is_integer(tensor):
        raise ValueError(f"{name} has dtype {tensor.dtype}; give int32 or int64")


def check_jagged(
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    offsets: Tensor | None,
) -> None:
    """Check that the fields of a jagged tensor fit together.

    Tensors on an accelerator are checked by shape and dtype only: looking at their values would
    wait for the device.

    Raises:
        ValueError: lengths and offsets both missing, a wrong shape or dtype, a negative length,
            or lengths/offsets that do not add up to the number of values.
    """
    if lengths is None and offsets is None:
        raise ValueError("lengths and offsets are both None; give one of them")
    if is_traced(values, weights, lengths, offsets):
        return
    if values.dim() == 0:
        raise ValueError("values is a scalar; give a tensor with one entry per id")
    total = values.size(0)
    if weights is not None and weights.size(0) != total:
        raise ValueError(
            f"weights has {weights.size(0)} entries but values has {total}; give one per value"
        )
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


def check_id_dtype(ids: Tensor) -> None:
    """Refuse values that are no ids.

    Raises:
        ValueError: the values are not int32 or int64.
    """
    if not is_traced(ids) and not _is_integer(ids):
        raise ValueError(f"values has dtype {ids.dtype}; ids are int32 or int64")


def check_keyed_jagged(
    keys: list[str],
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
) -> None:
    """Check keys against the number of bags.

    Raises:
        ValueError: a key twice, or a number of bags that is not ``len(keys) * stride``.
    """
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"keys holds {twice[0]!r} more than once; keys are unique")
    if is_traced(lengths, offsets):
        return
    if lengths is not None:
        bags = lengths.numel()
    else:
        assert offsets is not None
        bags = offsets.numel() - 1
    name = "lengths" if lengths is not None else "offsets"
    if stride is None:
        if bags % max(len(keys), 1) or (not keys and bags):
            raise ValueError(
                f"{name} describes {bags} bags, which do not divide evenly among {len(keys)} "
                "keys; give one bag per key and sample, feature-major"
            )
    elif bags != len(keys) * stride:
        raise ValueError(
            f"{name} describes {bags} bags, but {len(keys)} keys with stride {stride} make "
            f"{len(keys) * stride}"
        )
