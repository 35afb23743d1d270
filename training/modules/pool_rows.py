"""Rows of pools, read and written by number; each function is one step of a traced or scripted model.

A row of a pool of bags has its bags behind one another, and zeros behind them.

Legend: ``N`` rows that are read or written, ``F`` features, ``R`` rows of the pool, ``L`` columns of a row of bags,
``n`` ids of all bags.  Bags are *by row* where the ``F`` bags of a row are neighbours, as they are stored and as
they travel between ranks, and *by feature* in a `KeyedJaggedTensor`.
"""

import numpy as np
import torch
from torch import Tensor

from tessera.training.sparse.exchange import permute_segments
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Annotations are not postponed here: TorchScript compiles these functions by themselves.

_FEW = (
    128  # ids on a CPU that Python tells apart in less time than a sort's operations take to begin
)

Bags = tuple[Tensor, Tensor, Tensor | None]
"""Lengths ``[N * F]``, ids ``[n]``, and their weights ``[n]`` or not."""


@torch.fx.wrap
def checked_ids(ids: Tensor, pool_size: int) -> Tensor:
    """``ids`` as int64.

    Raises:
        ValueError: they are not integers, or not ``[N]``.
        IndexError: one is not a row; on an accelerator the check waits for the ids.
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise ValueError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; give int32 or int64 of shape [N]"
        )
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


def write_vectors(pool: Tensor, ids: Tensor, values: Tensor) -> None:
    """Write ``values`` ``[N, dim]`` to the rows ``ids`` ``[N]`` int64 of ``pool``; of an id that is there twice the last counts."""
    if ids.device.type == "cpu" and ids.numel() <= _FEW:
        place_of = {id_: place for place, id_ in enumerate(ids.tolist())}
        if len(place_of) == ids.numel():
            pool.index_copy_(0, ids, values.detach())
            return
        # By NumPy: for some 50 places it takes a fifth of the time of torch.tensor.
        last = torch.from_numpy(np.array([*place_of.values()], np.int64))
        pool.index_copy_(0, ids.index_select(0, last), values.detach().index_select(0, last))
    elif ids.device.type == "cpu":
        last = last_places(ids)
        pool.index_copy_(0, ids.index_select(0, last), values.detach().index_select(0, last))
    else:
        # An accelerator would have to be asked how many different ids there are; so each writes what the last of
        # its id does.
        in_order, places = torch.sort(ids, stable=True)
        ends = torch.searchsorted(in_order, in_order, right=True) - 1
        last = places.index_select(0, ends)
        pool.index_copy_(0, in_order, values.detach().index_select(0, last))


def _entries(lengths_S: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The segment of each entry of segments of these lengths, and its place in it; int64 ``[total]``.

    ``total`` is the sum of the lengths (int64): an accelerator would have to be asked for it.
    """
    segments = torch.repeat_interleave(lengths_S, output_size=total)
    starts = (lengths_S.cumsum(0) - lengths_S).index_select(0, segments)
    return segments, torch.arange(total, device=lengths_S.device) - starts


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
    segments, columns = _entries(lengths_N, int(lengths_N.sum()))
    rows = ids.index_select(0, segments)
    taken = weights[rows, columns] if weights is not None else None
    return lengths_NF.flatten(), values[rows, columns], taken


@torch.fx.wrap
def read_by_feature(
    keys: list[str], ids: Tensor, key_lengths: Tensor, values: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    """The bags of the rows ``ids`` ``[N]`` int64 as a batch; ``keys`` are the ``F`` features, else as `read_bags`."""
    lengths_NF = key_lengths.index_select(0, ids)
    firsts_FN = (lengths_NF.cumsum(1) - lengths_NF).t().flatten()
    lengths = lengths_NF.t().flatten()
    segments, places = _entries(lengths.long(), int(lengths.sum()))
    rows = ids.index_select(0, segments % ids.size(0)) if ids.size(0) > 0 else segments
    columns = firsts_FN.index_select(0, segments) + places
    return KeyedJaggedTensor(
        keys=keys,
        values=values[rows, columns],
        weights=weights[rows, columns] if weights is not None else None,
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
    kept = last_places(ids)
    lengths_N = lengths_NF.sum(1)
    firsts = (lengths_N.cumsum(0) - lengths_N).index_select(0, kept)
    lengths_K, ids_K = lengths_N.index_select(0, kept), ids.index_select(0, kept)
    every = kept.size(0) == ids.size(0)
    total = bags[1].size(0) if every else int(lengths_K.sum())
    segments, columns = _entries(lengths_K, total)
    taken = firsts.index_select(0, segments) + columns
    rows = ids_K.index_select(0, segments)
    values.index_fill_(0, ids_K, 0)
    values[rows, columns] = bags[1].index_select(0, taken)
    if weights is not None:
        weights.index_fill_(0, ids_K, 0.0)
        weights[rows, columns] = weights_of(bags).index_select(0, taken).to(weights.dtype)
    key_lengths.index_copy_(0, ids_K, lengths_NF.index_select(0, kept).to(key_lengths.dtype))


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
    kept = last_places(ids)
    ids_K = ids.index_select(0, kept)
    lengths_FN = features.lengths().view(keys, count)
    lengths_FK = lengths_FN.index_select(1, kept).long()
    all_lengths = features.lengths().long()
    firsts_FK = (all_lengths.cumsum(0) - all_lengths).view(keys, count).index_select(1, kept)
    columns_FK = lengths_FK.cumsum(0) - lengths_FK
    given = features.values()
    total = given.size(0) if kept.size(0) == count else int(lengths_FK.sum())
    segments, places = _entries(lengths_FK.flatten(), total)
    taken = firsts_FK.flatten().index_select(0, segments) + places
    columns = columns_FK.flatten().index_select(0, segments) + places
    rows = ids_K.index_select(0, segments % ids_K.size(0))
    values.index_fill_(0, ids_K, 0)
    values[rows, columns] = given.index_select(0, taken)
    if weights is not None:
        weights.index_fill_(0, ids_K, 0.0)
        weights[rows, columns] = features.weights().index_select(0, taken).to(weights.dtype)
    key_lengths.index_copy_(0, ids_K, lengths_FK.t().to(key_lengths.dtype))


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
    return KeyedJaggedTensor(
        keys=keys,
        values=permute_segments(values, lengths, moved),
        weights=permute_segments(weights, lengths, moved) if weights is not None else None,
        lengths=lengths[moved],
        stride=order.size(0),
    )


def bags_by_row(features: KeyedJaggedTensor, order: Tensor) -> Bags:
    """A batch's bags by row; row ``i`` is sample ``order[i]``, each of which is there once; lengths int32."""
    rows, keys = order.size(0), len(features.keys())
    firsts = torch.arange(keys, device=order.device) * rows
    moved = (order.unsqueeze(1) + firsts.unsqueeze(0)).flatten()
    lengths, weights = features.lengths(), features.weights_or_none()
    return (
        lengths[moved].int(),
        permute_segments(features.values(), lengths, moved),
        permute_segments(weights, lengths, moved) if weights is not None else None,
    )
