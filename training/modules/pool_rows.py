"""Rows of pools, read and written by number; each function is one step of a traced or scripted model.

A row of a pool of bags has its bags behind one another, and zeros behind them.

Legend: ``N`` rows that are read or written, ``F`` features, ``R`` rows of the pool, ``L`` columns of a row of bags,
``n`` ids of all bags.  Bags are *by row* where the ``F`` bags of a row are neighbours, as they are stored and as
they travel between ranks, and *by feature* in a `KeyedJaggedTensor`.
"""

import numpy as np
import torch
from torch import Tensor

from tessera.training.sparse.exchange import permute_each_bag, permute_segments
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.sparse.script_types import is_scripting

# Annotations are not postponed here: TorchScript compiles these functions by themselves.

_FEW = (
    128  # ids on a CPU that Python tells apart in less time than a sort's operations take to begin
)

Bags = tuple[Tensor, Tensor, Tensor | None]
"""Lengths ``[N * F]``, ids ``[n]``, and their weights ``[n]`` or not."""


def check_form(ids: Tensor) -> None:
    """Refuse ids that are not integers, or not ``[N]``, with a ValueError; no accelerator is waited for."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise ValueError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; give int32 or int64 of shape [N]"
        )


@torch.fx.wrap
def checked_ids(ids: Tensor, pool_size: int) -> Tensor:
    """``ids`` as int64.

    Raises:
        ValueError: they are not integers, or not ``[N]``.
        IndexError: one is not a row; on an accelerator the check waits for the ids.
    """
    check_form(ids)
    if ids.device.type != "meta" and ids.numel() > 0:
        ends = torch.aminmax(ids)
        if ids.device.type == "cpu":
            low, high = int(ends[0]), int(ends[1])
        else:  # one wait for both
            bounds: list[int] = torch.stack([ends[0], ends[1]]).tolist()
            low, high = bounds[0], bounds[1]
        if low < 0 or high >= pool_size:
            wrong = low if low < 0 else high
            raise IndexError(f"id {wrong} is not one of the pool's {pool_size} rows")
    return ids.long()


def last_places(ids: Tensor) -> Tensor:
    """The places in ``ids`` ``[N]`` of the last of each id, in the order of the ids; int64.

    Time and memory are of the ids that are given, however many rows the pool has.
    """
    in_order, places = torch.sort(ids, stable=True)
    ends = torch.ones_like(in_order, dtype=torch.bool)
    torch.ne(in_order[1:], in_order[:-1], out=ends[:-1])
    return places.masked_select(ends)


def _to_write(ids: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows to write of ``ids`` ``[N]`` int64, and the places of what belongs there, both ``[K]``; None: as it is.

    Of an id that is there twice the last one counts.  A CPU is given each row once.  An accelerator would have to be
    asked how many different ids there are, so there each of the ``N`` writes what the last of its id does.
    """
    if ids.device.type != "cpu":
        in_order, places = torch.sort(ids, stable=True)
        ends = torch.searchsorted(in_order, in_order, right=True) - 1
        return in_order, places.index_select(0, ends)
    if ids.numel() <= _FEW:
        place_of = {id_: place for place, id_ in enumerate(ids.tolist())}
        if len(place_of) == ids.numel():
            return ids, None
        # By NumPy: for some 50 places it takes a fifth of the time of torch.tensor.
        last = torch.from_numpy(np.array([*place_of.values()], np.int64))
    else:
        last = last_places(ids)
        if last.numel() == ids.numel():
            return ids, None
    return ids.index_select(0, last), last


def write_vectors(pool: Tensor, ids: Tensor, values: Tensor) -> None:
    """Write ``values`` ``[N, dim]`` to the rows ``ids`` ``[N]`` int64 of ``pool``; of an id that is there twice the last counts."""
    rows, last = _to_write(ids)
    pool.index_copy_(0, rows, _taken(values.detach(), last))


def _taken(values: Tensor, places: Tensor | None) -> Tensor:
    """Rows of ``values`` by number; None: all as they are."""
    return values if places is None else values.index_select(0, places)


def _places_in_rows(firsts_S: Tensor, lengths_S: Tensor, total: int) -> Tensor:
    """Where each entry of segments is in a matrix whose rows are behind one another; int64 ``[total]``.

    Args:
        firsts_S: int64, where each segment begins.
        lengths_S: int64, its entries.
        total: the sum of the lengths: an accelerator would have to be asked for it.
    """
    before = lengths_S.cumsum(0) - lengths_S
    at = torch.repeat_interleave(firsts_S - before, lengths_S, output_size=total)
    at += torch.arange(total, device=at.device)
    return at


@torch.fx.wrap
def read_bags(ids: Tensor, key_lengths: Tensor, values: Tensor, weights: Tensor | None) -> Bags:
    """The bags of the rows ``ids`` ``[N]`` int64, by row.

    Args:
        ids: the rows.
        key_lengths: ``[R, F]`` int32.
        values: ``[R, L]``.
        weights: like the values, or None.
    """
    lengths_NF = key_lengths.index_select(0, ids)
    lengths_N = lengths_NF.sum(1)
    at = _places_in_rows(ids * values.size(1), lengths_N, int(lengths_N.sum()))
    taken = weights.reshape(-1).index_select(0, at) if weights is not None else None
    return lengths_NF.flatten(), values.reshape(-1).index_select(0, at), taken


@torch.fx.wrap
def read_by_feature(
    keys: list[str], ids: Tensor, key_lengths: Tensor, values: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    """The bags of the rows ``ids`` ``[N]`` int64 as a batch; ``keys`` are the ``F`` features, else as `read_bags`."""
    lengths_NF = key_lengths.index_select(0, ids)
    firsts_NF = (ids * values.size(1)).unsqueeze(1) + (lengths_NF.cumsum(1) - lengths_NF)
    lengths = lengths_NF.t().flatten()
    at = _places_in_rows(firsts_NF.t().flatten(), lengths.long(), int(lengths.sum()))
    return KeyedJaggedTensor(
        keys=keys,
        values=values.reshape(-1).index_select(0, at),
        weights=weights.reshape(-1).index_select(0, at) if weights is not None else None,
        lengths=lengths,
        stride=ids.size(0),
    )


@torch.fx.wrap
def weights_of(bags: Bags) -> Tensor:
    """The weights of a weighted pool's bags; scripted models must be told that they are there."""
    weights = bags[2]
    assert weights is not None, "a weighted pool has weights"
    return weights


def write_bags(
    ids: Tensor,
    bags: Bags,
    key_lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
) -> None:
    """Write bags, by row, to the rows ``ids`` ``[N]`` int64; of an id that is there twice the last one counts.

    The other arguments are those of `read_bags`.
    """
    lengths_NF = bags[0].view(ids.size(0), key_lengths.size(1))
    firsts_N = torch.arange(ids.size(0), device=ids.device) * values.size(1)
    at = _places_in_rows(firsts_N, lengths_NF.sum(1), bags[1].size(0))
    _write_padded(ids, at, lengths_NF, bags, key_lengths, values, weights)


def write_by_feature(
    ids: Tensor,
    features: KeyedJaggedTensor,
    key_lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
) -> None:
    """Write a batch's ``N`` bags of each of the ``F`` features to the rows ``ids``; otherwise as `write_bags`."""
    count, keys = ids.size(0), key_lengths.size(1)
    if count == 0:
        return
    lengths = features.lengths()
    lengths_FN = lengths.view(keys, count)
    rows_N = torch.arange(count, device=ids.device) * values.size(1)
    firsts_FN = rows_N + (lengths_FN.cumsum(0) - lengths_FN)
    at = _places_in_rows(firsts_FN.flatten(), lengths.long(), features.values().size(0))
    bags = lengths, features.values(), features.weights_or_none()
    _write_padded(ids, at, lengths_FN.t(), bags, key_lengths, values, weights)


def _write_padded(  # noqa: PLR0917 - what `write_bags` was given and found
    ids: Tensor,
    at: Tensor,
    lengths_NF: Tensor,
    bags: Bags,
    key_lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
) -> None:
    """Write whole rows, filled up with zeros: no accelerator is asked how many entries of which ids there are.

    Args:
        ids: ``[N]`` int64, the rows.
        at: ``[n]`` int64, where each entry is among the ``N`` rows behind one another.
        lengths_NF: ``[N, F]``.
        bags: ids ``[n]`` and weights in the order of ``at``; the lengths are not looked at.
        key_lengths: ``[R, F]`` int32.
        values: ``[R, L]``.
        weights: like the values, or None.
    """
    rows, last = _to_write(ids)
    count, width = ids.size(0), values.size(1)
    padded = values.new_zeros(count * width).index_copy_(0, at, bags[1])
    values.index_copy_(0, rows, _taken(padded.view(count, width), last))
    if weights is not None:
        given = weights_of(bags).to(weights.dtype)
        padded = weights.new_zeros(count * width).index_copy_(0, at, given)
        weights.index_copy_(0, rows, _taken(padded.view(count, width), last))
    key_lengths.index_copy_(0, rows, _taken(lengths_NF, last).to(key_lengths.dtype))


@torch.fx.wrap
def keyed_bags(
    keys: list[str],
    order: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
) -> KeyedJaggedTensor:
    """Bags by row as a batch.

    Args:
        keys: the ``F`` features.
        order: ``[N]`` int64: sample ``i`` is row ``order[i]`` of those that are given; each is there once.
        lengths: ``[N * F]``, by row.
        values: ``[n]``.
        weights: ``[n]`` or None.
    """
    features = torch.arange(len(keys), device=order.device)
    moved = (order.unsqueeze(0) * len(keys) + features.unsqueeze(1)).flatten()
    if is_scripting():
        # What an operator does in one pass where Python has loaded it.
        weights = permute_segments(weights, lengths, moved) if weights is not None else None
        values, lengths = permute_segments(values, lengths, moved), lengths[moved]
    else:
        lengths, values, weights = permute_each_bag(moved, lengths, values, weights)
    return KeyedJaggedTensor(
        keys=keys, values=values, weights=weights, lengths=lengths, stride=order.size(0)
    )


def bags_by_row(features: KeyedJaggedTensor, order: Tensor) -> Bags:
    """A batch's bags by row; row ``i`` is sample ``order[i]``, each of which is there once; lengths int32."""
    rows, keys = order.size(0), len(features.keys())
    firsts = torch.arange(keys, device=order.device) * rows
    moved = (order.unsqueeze(1) + firsts.unsqueeze(0)).flatten()
    lengths, values, weights = permute_each_bag(
        moved, features.lengths(), features.values(), features.weights_or_none()
    )
    return lengths.int(), values, weights
