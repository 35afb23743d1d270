"""Examples ranked by score inside groups, on their device: what AUC, AUPRC, GAUC and NDCG are made of.

The functions of `tessera.training.metrics.binary` and `tessera.training.metrics.ranking` are for a whole
evaluation in the host's memory, and give standard errors; these are for windows of a training, which are
ranked again and again, and do not leave the device.

Examples of a group that score alike share a *block*; no result depends on their order.

Shapes: ``N`` examples, ``G`` groups.  Blocks are ``[N]``, too: those behind the last one are empty, so
that their number need not be known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MANY = 32_768  # integers, from which on torch sorts them by their digits on a CPU


def by_falling_score(scores: Tensor) -> Tensor:
    """The order ``[N]`` from the highest score down, equal ones by index; NaN before all others.

    Numbers of 32 and 64 bits are sorted as integers in the same order: on a CPU torch sorts many integers by
    their digits, which takes a third of the time of comparing floating-point numbers.
    """
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}.get(scores.dtype)
    if integers is None:
        return torch.argsort(scores, descending=True, stable=True)
    bits = (scores + 0.0).view(integers)  # makes 0 of -0
    greatest = torch.iinfo(integers).max
    # The bits of negative numbers rise where the numbers fall.
    rising = torch.where(bits < 0, bits ^ greatest, bits)
    return torch.argsort(~torch.where(scores.isnan(), greatest, rising), stable=True)


def order_in_groups(scores: Tensor, groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order ``[N]`` by group, then by score from the highest down, and the block ``[N]`` of each place."""
    order = by_falling_score(scores)
    if count > 1:
        by_group = torch.argsort(groups.index_select(0, order), stable=True)
        order = order.index_select(0, by_group)
    ranked, group = scores.index_select(0, order), groups.index_select(0, order)
    starts = torch.zeros_like(group)
    starts[1:] = (ranked[1:] != ranked[:-1]) | (group[1:] != group[:-1])
    return order, starts.cumsum(0)


@dataclass(frozen=True, kw_only=True)
class RankedBlocks:
    """The weights of positive and negative examples by block, from the highest score of each group down.

    A label between 0 and 1 makes its example partly positive.

    Attributes:
        group: int64 ``[N]``, the group of each block.
        positive: float64 ``[N]``, the weight of positive examples in it.
        negative: float64 ``[N]``, the weight of negative examples in it.
        positive_to: float64 ``[N]``, of those in it and above it in its group.
        negative_to: float64 ``[N]``, of those in it and above it in its group.
        positives: float64 ``[G]``, of all in the group.
        negatives: float64 ``[G]``, of all in the group.
        scores: int64 ``[G]``, how many different scores the group has.
    """

    group: Tensor
    positive: Tensor
    negative: Tensor
    positive_to: Tensor
    negative_to: Tensor
    positives: Tensor
    negatives: Tensor
    scores: Tensor


def ranked_blocks(
    scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor, count: int
) -> RankedBlocks:
    """Rank ``[N]`` examples of ``count`` groups, whose numbers ``groups`` are int64 ``[N]``."""
    order, block = order_in_groups(scores, groups, count)
    of_place = groups.index_select(0, order)
    group = torch.zeros_like(groups).scatter_(0, block, of_place)
    w, y = (given.index_select(0, order).double() for given in (weights, labels))
    of_blocks, of_groups, running = [], [], []
    for weight in (w * y, w * (1.0 - y)):
        by_block = torch.zeros_like(weight).index_add_(0, block, weight)
        by_group = sums_by_group(weight, of_place, count)
        before = by_group.cumsum(0) - by_group
        of_blocks.append(by_block)
        of_groups.append(by_group)
        running.append(by_block.cumsum(0) - before.index_select(0, group))
    first = torch.ones_like(block)
    first[1:] = block[1:] - block[:-1]
    return RankedBlocks(
        group=group,
        positive=of_blocks[0],
        negative=of_blocks[1],
        positive_to=running[0],
        negative_to=running[1],
        positives=of_groups[0],
        negatives=of_groups[1],
        scores=sums_by_group(first, of_place, count),
    )


def sums_by_group(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """The sum ``[G]`` of the values ``[N]`` of each of ``count`` groups, whose numbers ``groups`` are int64 ``[N]``."""
    if count == 1:  # a GPU would add to one number in memory, one value after another
        return values.sum().view(1)
    return values.new_zeros(count).index_add_(0, groups, values)


def areas_under_roc(blocks: RankedBlocks) -> Tensor:
    """The AUC ``[G]`` of each group, ties counting one half; 0.5 for one class, which ranks nothing."""
    won = blocks.negative * (blocks.positive_to - blocks.positive / 2)
    area = sums_by_group(won, blocks.group, len(blocks.positives))
    pairs = blocks.positives * blocks.negatives
    return torch.where(pairs == 0, 0.5, area / torch.where(pairs == 0, 1.0, pairs))


def area_under_roc(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The AUC of ``[N]`` examples of one group, at least one; as `areas_under_roc`, with half as many operations.

    It is for CPUs: a GPU would be waited for.
    """
    if scores.numel() < _MANY:
        ranked, order = scores.sort(descending=True)
    else:
        order = by_falling_score(scores)
        ranked = scores.index_select(0, order)
    w, y = (given.index_select(0, order).double() for given in (weights, labels))
    ends = torch.ones_like(ranked, dtype=torch.bool)  # of blocks
    torch.ne(ranked[1:], ranked[:-1], out=ends[:-1])
    positive_to, negative_to = (w * y).cumsum(0), (w * (1.0 - y)).cumsum(0)
    if not bool(ends.all()):
        positive_to, negative_to = positive_to.masked_select(ends), negative_to.masked_select(ends)
    # The first block begins where nothing is counted.
    won = torch.trapezoid(positive_to, negative_to) + positive_to[0] * negative_to[0] / 2
    pairs = positive_to[-1] * negative_to[-1]
    return torch.where(pairs == 0, 0.5, won / torch.where(pairs == 0, 1.0, pairs))


def average_precisions(blocks: RankedBlocks) -> Tensor:
    """The area ``[G]`` under each group's precision-recall curve, in steps; 0 without positive examples.

    A threshold counts with its precision, times the recall that it adds.
    """
    at_or_above = blocks.positive_to + blocks.negative_to
    empty = blocks.positive == 0
    part = torch.where(
        empty, 0.0, blocks.positive * blocks.positive_to / torch.where(empty, 1.0, at_or_above)
    )
    area = sums_by_group(part, blocks.group, len(blocks.positives))
    none = blocks.positives == 0
    return torch.where(none, 0.0, area / torch.where(none, 1.0, blocks.positives))


@dataclass(frozen=True, kw_only=True)
class Discounts:
    """What a gain counts at each place of examples that are sorted by group, whatever their order in it.

    Attributes:
        group: int64 ``[N]``, of the example at each place.
        discount: float64 ``[N]``, one over ``log2(place + 1)``, the first place of a group being 1.
        groups: ``G``.
    """

    group: Tensor
    discount: Tensor
    groups: int


def discounts_of(sizes: Tensor, examples: int, k: int | None) -> Discounts:
    """The discounts of groups of ``sizes`` int64 ``[G]`` examples, whose sum is ``examples``.

    Places behind the ``k``-th count 0; None: all places count.
    """
    group = torch.repeat_interleave(sizes, output_size=examples)
    firsts = (sizes.cumsum(0) - sizes).index_select(0, group)
    place = torch.arange(examples, device=sizes.device) - firsts
    discount = 1.0 / torch.log2(place.double() + 2.0)
    if k is not None:
        discount = torch.where(place < k, discount, 0.0)
    return Discounts(group=group, discount=discount, groups=len(sizes))


def discounted_gains(scores: Tensor, gains: Tensor, groups: Tensor, discounts: Discounts) -> Tensor:
    """Each group's sum ``[G]`` of gains ``[N]`` times the discounts of their places.

    Examples that score alike share the mean discount of their places.

    Args:
        scores: ``[N]``.
        gains: float64 ``[N]``.
        groups: int64 ``[N]`` from 0.
        discounts: of the groups.
    """
    order, block = order_in_groups(scores, groups, discounts.groups)
    discount = discounts.discount
    total = torch.zeros_like(discount).index_add_(0, block, discount)
    alike = torch.zeros_like(discount).index_add_(0, block, torch.ones_like(discount))
    mean = (total / alike.clamp(min=1.0)).index_select(0, block)
    return sums_by_group(gains.index_select(0, order) * mean, discounts.group, discounts.groups)
