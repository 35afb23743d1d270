"""In-training embedding pruning: a table has rows for those of its ids that are used most.

Which these are is decided again and again while the model is trained.  Each id has an address, the row that it is looked up at, and a use, how often it came. A table of ``E`` rows for ``U``
ids gives the first ``E`` ids a row each at first. All others share the first row. At a pruning

* the threshold is that use which the share ``1 - E / U`` of the ids do not exceed, in a sample of one id in 23;
* ids that share the first row and whose use is above the threshold are to get rows, in the order of the ids;
* ids that have a row and whose use is not above it are to lose them, in the same order;
* as many as there are of both change places: the new id gets the row of the old one, which shares the first row
  from then on.  The others stay as they are.

The operations are those of FBGEMM's ``init_address_lookup``, ``prune_embedding_tables`` and
``remap_indices_update_utils``, which exist for CUDA alone; here they are written in torch for every device.  A table
of fewer than 23 ids is sampled whole, and one with a row for each id is left alone.

Legend: ``U`` ids, ``E`` rows, ``n`` ids of a batch.
"""

from __future__ import annotations

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


def threshold(use: Tensor, rows: int, cur_iter: int) -> Tensor:
    """The use above which ids get rows, a float32 scalar.

    Args:
        use: ``[U]`` float32.
        rows: ``E``, fewer than ``U``.
        cur_iter: the step, which says which ids are the sample.
    """
    ids = use.numel()
    stride = IDS_PER_SAMPLE if ids >= IDS_PER_SAMPLE else 1
    count = ids // stride
    places = (torch.arange(count, device=use.device) * stride + cur_iter % stride).clamp(
        max=ids - 1
    )
    sample = use[places].sort().values
    # In float32, as FBGEMM has it.
    kept = torch.tensor(rows, dtype=torch.float32) / torch.tensor(ids, dtype=torch.float32)
    share = torch.tensor(1.0 - float(kept), dtype=torch.float32)
    return sample[min(int((share * count).floor()), count - 1)]


@torch.no_grad()
def prune(address: Tensor, use: Tensor, rows: int, cur_iter: int, interval: int) -> Tensor:
    """Give rows to ids that are used more than those that have them.

    Args:
        address: ``[U]`` int64; changed here.
        use: ``[U]`` float32; from step ``interval`` on it decays by 2% here.
        rows: ``E``.
        cur_iter: the step.
        interval: steps between two prunings.

    Returns:
        ``[m]`` int64, the rows that belong to another id now.
    """
    if rows >= address.numel():
        return address.new_empty(0)
    if cur_iter > interval:
        use *= DECAY
    above = use > threshold(use, rows, cur_iter)
    gain, lose = (above & (address == 0)).nonzero(), (~above & (address != 0)).nonzero()
    count = min(len(gain), len(lose))
    gain, lose = gain[:count, 0], lose[:count, 0]
    moved = address[lose]
    address[gain] = moved
    address[lose] = 0
    return moved


def count_use(use: Tensor, ids: Tensor, times: Tensor | None = None) -> None:
    """Add to ``use`` ``[U]`` that the ids ``[n]`` came once each, or ``times`` ``[n]`` each."""
    each = torch.ones(ids.numel(), device=ids.device) if times is None else times.float()
    use.index_add_(0, ids, each)
