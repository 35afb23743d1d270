"""In-training embedding pruning: a table has rows for those of its ids that are used most.

Which these are is decided again and again while the model is trained.  Each id has an address, the row that it is
looked up at, and a use, how often it came.  A table of ``E`` rows for ``U`` ids gives the first ``E`` ids a row each at first. All others share the first row. At a pruning

* the threshold is that use which the share ``1 - E / U`` of the ids do not exceed, in a sample of one id in 23;
* ids that share the first row and whose use is above the threshold are to get rows, in the order of the ids;
* ids that have a row and whose use is not above it are to lose them, in the same order;
* as many as there are of both change places: the new id gets the row of the old one, which shares the first row
  from then on.  The others stay as they are.

The operations are those of FBGEMM's ``init_address_lookup``, ``prune_embedding_tables`` and
``remap_indices_update_utils``, which exist for CUDA alone; here they are written in torch for every device.  A table
of fewer than 23 ids is sampled whole.

Legend: ``U`` ids, ``E`` rows, ``n`` ids of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

IDS_PER_SAMPLE = 23
DECAY = 0.98


def first_addresses(ids: int, rows: int, device: torch.device | None = None) -> Tensor:
    """``[U]`` int64: each of the first ``rows`` ids has its own row, all others have the first one."""
    address = torch.arange(ids, device=device)
    address[rows:] = 0
    return address


def counts_use(cur_iter: int) -> bool:
    """Whether the uses of a step's ids are counted: of the first ten steps, then of one in 19, and one in 39."""
    return (
        cur_iter < 10 or (cur_iter < 100 and (cur_iter + 1) % 19 == 0) or (cur_iter + 1) % 39 == 0
    )


def prunes(cur_iter: int, interval: int) -> bool:
    """Whether a step begins with a pruning: the earlier in training the oftener, later every ``interval`` steps."""
    step = cur_iter + 1
    return (
        (cur_iter < 10 and step % 3 == 0)
        or (cur_iter < 100 and step % 30 == 0)
        or (cur_iter < 1000 and step % 300 == 0)
        or step % interval == 0
    )


def thresholds(uses: Sequence[Tensor], rows: Sequence[int], cur_iter: int) -> Tensor:
    """The use above which ids get rows, float32 ``[T]`` for ``T`` tables.

    Args:
        uses: of each table ``[U]`` float32.
        rows: ``E`` of each, fewer than ``U``.
        cur_iter: the step, which says which ids are the sample.
    """
    samples, places = [], []
    for use, own in zip(uses, rows, strict=True):
        ids = use.numel()
        stride = IDS_PER_SAMPLE if ids >= IDS_PER_SAMPLE else 1
        count = ids // stride
        samples.append(use[cur_iter % stride :: stride][:count])
        # In float32, as FBGEMM has it.
        kept = np.float32(own) / np.float32(ids)
        share = np.float32(1.0 - float(kept))
        places.append(min(int(np.floor(share * np.float32(count))), count - 1))
    if len(samples) == 1:
        return samples[0].sort().values[places[0]].view(1)
    # All samples are sorted at once: by use, then by table, which keeps the order of the uses.
    in_order, order = torch.cat(samples).sort()
    by_table = _by_table([len(sample) for sample in samples], in_order.device)[order].argsort(
        stable=True
    )
    ends = accumulate(map(len, samples), initial=0)
    limits = [by_table[first + place].view(1) for first, place in zip(ends, places, strict=False)]
    return in_order[torch.cat(limits)]


def _by_table(counts: Sequence[int], device: torch.device) -> Tensor:
    """The number of the table that each of its ``counts`` ids belongs to, int32."""
    numbers = torch.arange(len(counts), dtype=torch.int32, device=device)
    return torch.cat([numbers[n : n + 1].expand(count) for n, count in enumerate(counts)])


@torch.no_grad()
def prune(
    addresses: Sequence[Tensor],
    uses: Sequence[Tensor],
    rows: Sequence[int],
    cur_iter: int,
    interval: int,
) -> list[Tensor]:
    """Give rows to ids that are used more than those that have them, in each of ``T`` tables on one device.

    All tables are pruned at once: an accelerator is waited for twice, however many there are.

    Args:
        addresses: of each table ``[U]`` int64; changed here.
        uses: of each ``[U]`` float32; from step ``interval`` on they decay by 2% here.
        rows: ``E`` of each, fewer than ``U``.
        cur_iter: the step.
        interval: steps between two prunings.

    Returns:
        Of each table ``[m]`` int64, the rows that belong to another id now.
    """
    if not addresses:
        return []
    if cur_iter > interval:
        torch._foreach_mul_(list(uses), DECAY)
    sizes = [len(use) for use in uses]
    limits = thresholds(uses, rows, cur_iter)
    limit = torch.cat([limits[n : n + 1].expand(size) for n, size in enumerate(sizes)])
    above, address = torch.cat(list(uses)) > limit, torch.cat(list(addresses))
    shares = address == 0
    marks = torch.stack(
        [above & shares, ~(above | shares)]
    )  # those that are to get rows, and to lose them
    upto = marks.cumsum(1)
    ends = [upto[:, end - 1 : end] for end in accumulate(sizes)]
    gains, losses = ([0, *each] for each in torch.cat(ends, 1).tolist())
    counts = [
        min(gained - had, lost - left)
        for (had, gained), (left, lost) in zip(pairwise(gains), pairwise(losses), strict=True)
    ]
    ids = marks.nonzero()[:, 1]

    def first(bounds: list[int], start: int) -> Tensor:
        """The first marked ids of each table, as many as change places; ``start`` is where such marks begin."""
        own = zip(bounds, counts, strict=False)
        return torch.cat([ids[start + begin : start + begin + count] for begin, count in own])

    gain, lose = first(gains, 0), first(losses, gains[-1])
    moved = address[lose]
    address[gain] = moved
    address.index_fill_(0, lose, 0)
    torch._foreach_copy_(list(addresses), list(address.split_with_sizes(sizes)))
    return list(moved.split_with_sizes(counts))


def count_use(use: Tensor, ids: Tensor, times: Tensor | None = None) -> None:
    """Add to ``use`` ``[U]`` that the ids ``[n]`` came once each, or ``times`` ``[n]`` each."""
    each = torch.ones(ids.numel(), device=ids.device) if times is None else times.float()
    use.index_add_(0, ids, each)
