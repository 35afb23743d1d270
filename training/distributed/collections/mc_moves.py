"""Spreads a loaded map of managed collisions, and the rows of its ids, over other ranks than saved it.

With W ranks an id belongs to the rank of its range of ids, and that rank's rows are one block of the table.
With another W an id may belong to another rank, which has to give it a row of its own block:

* each pair of an id and its row goes to the rank that the id belongs to now (all-to-all);
* that rank keeps as many ids as its block has rows for, by the policy's scores; an id whose row is in the
  block keeps it, the others get the rows that are left;
* the numbers of the rows, weights and optimizer states, come from the ranks that have loaded them
  (all-to-all of row numbers, then of bytes).

The row of a block's unknown ids comes from the saved block whose ids included the first of the new range.
A block's open rows keep what was loaded: an id that gets one begins anew.

Legend: ``P`` pairs, ``Z`` rows of a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.errors import UserError
from tessera.training.distributed.tables.batched_kernels import FusedKernel, Kernel
from tessera.training.distributed.travel.bucketize import ranks_of_ids
from tessera.training.modules.mc_sorted_map import MCHManagedCollisionModule


def fits_without_moves(part: MCHManagedCollisionModule, now: Sequence[int]) -> bool:
    """Whether each block of rows, and its range of ids, is made of whole saved ones.

    Args:
        part: of a map, as it was loaded.
        now: the first row of each rank's block, and the end.
    """
    saved = part.saved_segments()
    ids_now, ids_saved = part.range_bounds(list(now)), part.range_bounds(saved)
    return set(now) <= set(saved) and set(ids_now) <= set(ids_saved)


@torch.no_grad()
def spread_map(
    part: MCHManagedCollisionModule,
    kernel: Kernel,
    place: int,
    now: Sequence[int],
    pg: dist.ProcessGroup,
) -> None:
    """Give the ids of this rank's range rows of its block; every rank of ``pg`` calls it.

    Args:
        part: of the map: what was loaded at this rank's rows, other ranks' ids included.
        kernel: holds this rank's block of the table, as it was loaded.
        place: of the block among the kernel's shards.
        now: the first row of each rank's block, and the end.
        pg: the ranks.

    Raises:
        UserError: the table is trained by an optimizer of the user's, whose states would not move along.
    """
    if not isinstance(kernel, FusedKernel):
        raise UserError(
            f"table {kernel.tables[place].name!r} behind managed collisions has ordinary parameters, and "
            "was saved on ranks with other blocks; load it on a number of ranks that divides theirs"
        )
    rank = pg.rank()
    bounds, pairs = part.range_bounds(list(now)), part.pairs()
    saved = part.saved_segments()
    owners = ranks_of_ids(part.range_key(pairs[:, 0]), bounds)
    source_Z = part.take_pairs(_exchanged(pairs, owners, pg))
    # Where the unknown ids of this range had their row.
    block = bisect_right(part.range_bounds(saved), bounds[rank]) - 1
    source_Z[-1] = saved[min(block, len(saved) - 2) + 1] - 1
    blocks = torch.tensor(list(now), device=source_Z.device)
    tensors = [kernel.split_embedding_weights()[place], *kernel.states_by_table()[place]]
    moved = _rows_from(tensors, source_Z, blocks, pg)
    for tensor, values in zip(tensors, moved, strict=True):
        tensor.copy_(values)


def _exchanged(rows: Tensor, ranks: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """``rows`` ``[P, ...]``, each sent to its rank; what has come, by rank, in the senders' order."""
    order = ranks.argsort(stable=True)
    sent = torch.bincount(ranks, minlength=pg.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=pg)
    result = rows.new_empty((int(received.sum()), *rows.shape[1:]))
    dist.all_to_all_single(
        result, rows[order].contiguous(), received.tolist(), sent.tolist(), group=pg
    )
    return result


def _rows_from(
    tensors: Sequence[Tensor], source_Z: Tensor, blocks: Tensor, pg: dist.ProcessGroup
) -> list[Tensor]:
    """Rows of a table from the ranks that hold them.

    Args:
        tensors: of this rank's block, ``[Z, ...]`` each.
        source_Z: of each row of the block, the row of the table that it gets.
        blocks: the first row of each rank's block, and the end.
        pg: the ranks.
    """
    ranks = torch.searchsorted(blocks, source_Z, right=True) - 1
    order = ranks.argsort(stable=True)
    asked = torch.bincount(ranks, minlength=pg.size())
    wanted = torch.empty_like(asked)
    dist.all_to_all_single(wanted, asked, group=pg)
    rows = source_Z.new_empty(int(wanted.sum()))
    dist.all_to_all_single(rows, source_Z[order], wanted.tolist(), asked.tolist(), group=pg)
    here = rows - blocks[pg.rank()]
    found = []
    for tensor in tensors:
        answers = tensor[here.to(tensor.device)].contiguous()
        got = torch.empty_like(tensor)
        dist.all_to_all_single(got, answers, asked.tolist(), wanted.tolist(), group=pg)
        values = torch.empty_like(tensor)
        values[order.to(tensor.device)] = got
        found.append(values)
    return found
