"""Rows of pools, read and written by number; each function is one step of a traced or scripted model.

A row of a pool of bags has its bags behind one another, and zeros behind them.

Legend: ``N`` rows that are read or written, ``F`` features, ``R`` rows of the pool, ``L`` columns of a row of bags,
``n`` ids of all bags.  Bags are *by row* where the ``F`` bags of a row are neighbours, as they are stored and as
they travel between ranks, and *by feature* in a `KeyedJaggedTensor`.
"""

import torch
from torch import Tensor

from tessera.training.sparse.exchange import permute_segments
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# Annotations are not postponed here: TorchScript compiles these functions by themselves.

Bags = tuple[Tensor, Tensor, Tensor | None]
"""Lengths ``[N * F]``, ids ``[n]``, and their weights ``[n]`` or not."""


@torch.fx.wrap
def checked_ids(ids: Tensor, pool_size: int) -> Tensor:
    """``ids`` as int64.

    Raises:
        ValueError: they are not integers, or not ``[N]``.
        IndexError: one is not a row (ids on the CPU).
    """
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise ValueError(
            f"ids are {ids.dtype} of shape {list(ids.shape)}; give int32 or int64 of shape [N]"
        )
    if ids.device.type == "cpu" and ids.numel() > 0:
        ends = torch.aminmax(ids)
        low, high = int(ends[0]), int(ends[1])
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
    last = last_places(ids)
    pool.index_copy_(0, ids.index_select(0, last), values.detach().index_select(0, last))


def _cells(ids: Tensor, lengths_N: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of each id of the rows ``ids`` that hold ``lengths_N`` ids, row by row; int64 ``[n]``."""
    lengths_N = lengths_N.long()
    rows = torch.repeat_interleave(ids, lengths_N)
    starts = torch.repeat_interleave(lengths_N.cumsum(0) - lengths_N, lengths_N)
    return rows, torch.arange(rows.size(0), device=ids.device) - starts


@torch.fx.wrap
def read_bags(ids: Tensor, key_lengths: Tensor, values: Tensor, weights: Tensor | None) -> Bags:
    """The bags of the rows ``ids`` ``[N]`` int64, by row.

    Args:
        ids: the rows.
        key_lengths: ``[R, F]`` int32.
        values: ``[R, L]``.
        weights: like the values, or None.
    """
    lengths_NF = key_lengths[ids]
    rows, columns = _cells(ids, lengths_NF.sum(1))
    taken = weights[rows, columns] if weights is not None else None
    return lengths_NF.flatten(), values[rows, columns], taken


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
    if kept.size(0) < ids.size(0):
        chosen = torch.zeros(ids.size(0), dtype=torch.bool, device=ids.device)
        chosen[kept] = True
        of_kept = torch.repeat_interleave(chosen, lengths_NF.sum(1).long())
        given = bags[2]
        bags = (bags[0], bags[1][of_kept], given[of_kept] if given is not None else None)
        ids, lengths_NF = ids[chosen], lengths_NF[chosen]
    rows, columns = _cells(ids, lengths_NF.sum(1))
    values[ids] = 0
    values[rows, columns] = bags[1]
    if weights is not None:
        weights[ids] = 0.0
        weights[rows, columns] = weights_of(bags).to(weights.dtype)
    key_lengths[ids] = lengths_NF.to(key_lengths.dtype)


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
