"""AUC of groups whose examples stand beside one another, as the rows of a matrix or as one vector of all examples.

It is that of `tessera.training.metrics.ranked`, with half as many operations; what a GPU takes for a few thousand
examples is mostly the start of its kernels.

Shapes: ``G`` groups, ``L`` examples of the longest; a vector of one group has the shape ``[L]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowAreas:
    """Groups, ranked by falling score; examples that score alike share a block.

    Attributes:
        won: float64 ``[G]``, the weight of the pairs of a positive and a negative example of which the positive one
            scores higher; pairs that score alike count one half.
        positives: float64 ``[G]``, the weight of positive examples.
        negatives: float64 ``[G]``, the weight of negative examples.
        blocks: int64 ``[G, L]``, the block of each place, from 1.
    """

    won: Tensor
    positives: Tensor
    negatives: Tensor
    blocks: Tensor

    def aucs(self) -> Tensor:
        """The AUC ``[G]`` of each group, 0.5 for one class, which ranks nothing."""
        pairs = self.positives * self.negatives
        none = pairs == 0
        return torch.where(none, 0.5, self.won / torch.where(none, 1.0, pairs))


def row_areas(scores: Tensor, labels: Tensor, weights: Tensor) -> RowAreas:
    """Rank the examples of each row, at least one.

    A label between 0 and 1 makes its example partly positive.  What fills a row up has the weight 0, and the score
    minus infinity.

    Args:
        scores: ``[G, L]`` or ``[L]``, floating-point.
        labels: of the same shape.
        weights: of the same shape.
    """
    # Equal scores stay in their order, so that what fills a row up comes last.
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    w, y = (given.gather(-1, order).double() for given in (weights, labels))
    starts = torch.ones_like(ranked, dtype=torch.bool)
    torch.ne(ranked[..., 1:], ranked[..., :-1], out=starts[..., 1:])
    blocks = starts.cumsum(-1)
    first = torch.searchsorted(blocks, blocks)  # the first place of each one's block
    above, upto = [], []
    for weight in (w * y, w * (1.0 - y)):
        running = torch.nn.functional.pad(weight.cumsum(-1), (1, 0))
        above.append(running.gather(-1, first))
        upto.append(running[..., 1:])
    # Twice what each block wins, at its last place; elsewhere it is that of a part of the block.
    won = (upto[1] - above[1]) * (upto[0] + above[0])
    of_blocks = (won[..., :-1] * starts[..., 1:]).sum(-1) + won[..., -1]
    return RowAreas(
        won=of_blocks / 2, positives=upto[0][..., -1], negatives=upto[1][..., -1], blocks=blocks
    )


def as_rows(values: Tensor, cells: Tensor, groups: int, longest: int, filling: float) -> Tensor:
    """Values ``[N]`` as ``[G, L]``, ``filling`` where a group is shorter; ``cells`` int64 ``[N]`` says where each stands."""
    table = values.new_full((groups * longest,), filling)
    return table.index_copy_(0, cells, values).view(groups, longest)
