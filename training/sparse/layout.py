"""Where the bags and ids of a keyed jagged tensor lie: small functions of lists and tensors.

All of them compile under ``torch.jit.script``; none of them names a jagged type.  Legend: ``F``
keys, ``B`` samples, ``S_f`` bags of key ``f`` (``B`` unless the batch varies per key), ``N`` ids.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor

from tessera.training.sparse.checks import is_traced, values_are_unknown
from tessera.training.sparse.script_types import is_scripting


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """``[n]`` lengths to ``[n + 1]`` int64 offsets: 0, then the running sum."""
    if is_scripting():
        pass
    elif not values_are_unknown(lengths) and lengths.numel() > 0 and "fbgemm_gpu" in sys.modules:
        # One operator in place of two of torch's, which make several more; in every lookup.
        return cast("Tensor", torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.long()))
    return torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int64), [1, 0])


def offsets_to_lengths(offsets: Tensor) -> Tensor:
    """``[n + 1]`` offsets to ``[n]`` lengths of the same dtype."""
    return offsets[1:] - offsets[:-1]


def running_sum(parts: list[int]) -> list[int]:
    """0, then the running sum: ``n + 1`` numbers of ``n``."""
    total = 0
    bounds = [0]
    for part in parts:
        total = total + part
        bounds.append(total)
    return bounds


def spread(total: int, keys: int) -> list[int]:
    """``F + 1`` bounds of ``total`` ids spread evenly over the keys, what is left with the first."""
    if keys == 0:
        return [0]
    return [0] + [total - total // keys * (keys - key) for key in range(1, keys)] + [total]


def known_lengths(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Return the lengths, computed from the offsets if need be."""
    if lengths is not None:
        return lengths
    if offsets is None:
        raise ValueError("lengths and offsets are both None; give one of them")
    return offsets_to_lengths(offsets)


def known_offsets(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    """Return the offsets, computed from the lengths if need be."""
    if offsets is not None:
        return offsets
    if lengths is None:
        raise ValueError("lengths and offsets are both None; give one of them")
    return lengths_to_offsets(lengths)


def batch_size(
    keys: int,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride_per_key_per_rank: list[list[int]] | None,
    inverse_indices: tuple[list[str], Tensor] | None,
) -> int:
    """``B``: of a batch that varies per key, the inverse indices', or the most of any key."""
    if keys == 0:
        return 0
    if stride_per_key_per_rank is not None:
        if inverse_indices is not None and inverse_indices[1].numel() > 0:
            return inverse_indices[1].size(-1)
        largest = 0
        for per_rank in stride_per_key_per_rank:
            largest = max(largest, sum(per_rank))
        return largest
    if lengths is not None:
        return lengths.numel() // keys
    if offsets is not None:
        return (offsets.numel() - 1) // keys
    return 0


def ids_per_key(
    lengths: Tensor | None,
    offsets: Tensor | None,
    bag_bounds: list[int],
    stride: int,
    varies: bool,  # noqa: FBT001 - TorchScript calls it by position
) -> list[int]:
    """``F + 1`` bounds of the keys' ids, from those of their bags and ``[sum of S_f]`` lengths.

    It reads the lengths (or offsets), so it waits for their device.
    """
    keys = len(bag_bounds) - 1
    if is_scripting():
        pass
    elif is_traced(lengths, offsets):
        # 0-dimensional traced tensors stand in for ints: slices take them as bounds.
        where = known_offsets(lengths, offsets)
        return cast("list[int]", [where[bound] for bound in bag_bounds])
    if offsets is None and lengths is not None and not varies:
        counts: list[int] = lengths.view(keys, stride).sum(dim=1).tolist()
        return running_sum(counts)
    found = known_offsets(lengths, offsets)
    places = torch.tensor(bag_bounds, dtype=torch.int64).to(found.device)
    bounds: list[int] = found.index_select(0, places).tolist()
    return bounds


def segments(source: Tensor, bounds: list[int], indices: list[int]) -> Tensor:
    """Segments ``indices`` of ``source`` (``[n]`` or ``[n, D]``), in that order.

    ``bounds`` are where each segment starts, then ``n``.
    """
    if len(indices) == 0:
        return source[:0]
    traced = False
    if not is_scripting():
        traced = is_traced(source, *bounds)
    if traced or len(indices) < 4:
        parts = [source[bounds[index] : bounds[index + 1]] for index in indices]
    else:
        # One operation instead of one per segment.
        sizes = [bounds[place + 1] - bounds[place] for place in range(len(bounds) - 1)]
        every = torch.split_with_sizes(source, sizes)
        parts = [every[index] for index in indices]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def permuted_lengths(
    lengths: Tensor, bag_bounds: list[int], indices: list[int], indices_tensor: Tensor | None
) -> Tensor:
    """The lengths of the keys ``indices``, in that order, out of the ``[F * B]`` of all keys.

    ``indices_tensor`` holds the same places on the lengths' device, or is None.
    """
    if is_scripting():
        pass
    elif is_traced(lengths):
        return segments(lengths, bag_bounds, indices)
    if indices_tensor is None:
        if lengths.is_cuda:
            # Slices are views, and a list of places would have to be copied there.
            return segments(lengths, bag_bounds, indices)
        indices_tensor = torch.tensor(indices, dtype=torch.int64)
    keys = len(bag_bounds) - 1
    if keys == 0:
        return lengths
    return lengths.view(keys, -1).index_select(0, indices_tensor).flatten()


def place_of(keys: list[str], key: str) -> int:
    """Where ``key`` stands among ``keys``; its last place.

    Raises:
        KeyError: it is not there.
    """
    for index in range(len(keys) - 1, -1, -1):
        if keys[index] == key:
            return index
    raise KeyError(f"no key '{key}'; there are {keys}")


def uneven(stride_per_key: list[int]) -> list[list[int]] | None:
    """Strides per key and rank of one rank; None where all keys have as many bags.

    While they are traced they count as alike: what is traced has one batch size.
    """
    if is_scripting():
        pass
    elif is_traced(*stride_per_key):
        return None
    for stride in stride_per_key:
        if stride != stride_per_key[0]:
            return [[own] for own in stride_per_key]
    return None


def bags_of_keys(
    keys: int,
    lengths: Tensor | None,
    offsets: Tensor | None,
    stride: int | None,
    stride_per_key: list[int] | None,
) -> list[list[int]]:
    """Strides per key and rank of one rank, from whichever field is there."""
    if stride_per_key is None:
        if stride is None:
            stride = batch_size(keys, lengths, offsets, None, None)
        stride_per_key = [stride for _ in range(keys)]
    return [[own] for own in stride_per_key]


def common_stride(strides: list[int]) -> int:
    """Return the batch size that several tensors have in common.

    Raises:
        ValueError: it differs.
    """
    if is_scripting():
        pass
    elif is_traced(*strides):
        return strides[0]
    for stride in strides:
        if stride != strides[0]:
            raise ValueError(f"the tensors have different batch sizes: {strides}")
    return strides[0]


def all_or_none(weights: list[Tensor | None]) -> Tensor | None:
    """The weights one after the other; None where there are none.

    Raises:
        ValueError: some are there and some are not.
    """
    present: list[Tensor] = []
    for weight in weights:
        if weight is not None:
            present.append(weight)  # noqa: PERF401 - TorchScript has no "if" in comprehensions
    if len(present) == 0:
        return None
    if len(present) != len(weights):
        raise ValueError("some tensors have weights and some have not; give all or none")
    return torch.cat(present)


def joined_inverse(
    parts: list[tuple[list[str], Tensor] | None],
) -> tuple[list[str], Tensor] | None:
    """The inverse indices of several tensors' keys; None where there are none.

    Raises:
        ValueError: some are there and some are not, or their numbers of samples differ.
    """
    keys: list[str] = []
    rows: list[Tensor] = []
    for part in parts:
        if part is not None:
            keys.extend(part[0])
            rows.append(part[1])
    if len(rows) == 0:
        return None
    if len(rows) != len(parts):
        raise ValueError("some tensors have inverse_indices and some have not; give all or none")
    common_stride([row.size(-1) for row in rows])
    return keys, torch.cat(rows)
