"""Metrics of how a score ranks the rows inside each group, such as the items that a user was shown.

``N`` rows with scores, labels and groups ``[N]``; groups are integers, equal where rows belong together.

*Ties*: rows of a group with equal scores stand in every order with equal probability, and each metric is
its mean over these orders.  So no model gains by scoring alike, and the rows' order in the data changes
nothing.  scikit-learn's ``ndcg_score`` and ``roc_auc_score`` have the same rule.
"""

from __future__ import annotations

import numpy as np

from tessera.training.metrics.estimate import Estimate, Floats, Numbers, undefined


def gauc(scores: Numbers, labels: Numbers, groups: Numbers) -> float:
    """See `GroupRanking.gauc`."""
    return GroupRanking(scores, labels, groups).gauc().value


def recall_at_k(scores: Numbers, labels: Numbers, groups: Numbers, k: int) -> float:
    """See `GroupRanking.recall_at_k`."""
    return GroupRanking(scores, labels, groups).recall_at_k(k).value


def ndcg_at_k(scores: Numbers, labels: Numbers, groups: Numbers, k: int) -> float:
    """See `GroupRanking.ndcg_at_k`."""
    return GroupRanking(scores, labels, groups).ndcg_at_k(k).value


class GroupRanking:
    """Rows ranked inside their groups, once for all metrics; holds about 60 bytes a row.

    Args:
        scores: the higher, the earlier.
        labels: how relevant a row is, at least 0; a row with more than 0 is a positive one.
        groups: see the module.
        weights: what a row counts in GAUC; None: all the same.

    Raises:
        ValueError: a label is below 0.
    """

    def __init__(
        self, scores: Numbers, labels: Numbers, groups: Numbers, weights: Numbers | None = None
    ) -> None:
        if len(labels) and not float(np.min(labels)) >= 0:
            raise ValueError(
                "labels: one is below 0; give how relevant each row is, 0 if it is not"
            )
        self._count = len(scores)
        self._order = np.lexsort((-np.asarray(scores, np.float64), groups))
        ranked_groups = np.asarray(groups)[self._order]
        ranked_scores = np.asarray(scores)[self._order]
        new_group = np.r_[True, ranked_groups[1:] != ranked_groups[:-1]][: self._count]
        new_block = new_group | np.r_[True, ranked_scores[1:] != ranked_scores[:-1]][: self._count]
        self._starts = np.flatnonzero(new_group)
        self._group = np.cumsum(new_group) - 1
        self._blocks = np.flatnonzero(new_block)
        self._block = np.cumsum(new_block) - 1
        self._rank = np.arange(self._count) - self._starts[self._group]
        self._labels = np.asarray(labels, np.float64)[self._order]
        self._weights = None if weights is None else np.asarray(weights, np.float64)[self._order]

    def gauc(self) -> Estimate:
        """AUC by group: the mean of the groups' AUCs, each weighted by the group's rows (impressions).

        Groups without a positive or without a negative row have no AUC and are left out (Zhu et al.
        2017, "Optimized cost per click in Taobao display advertising", where it is called GAUC and
        impressions are one choice of weights; Zhou et al. 2018, "Deep interest network", also).
        """
        w = np.ones(self._count) if self._weights is None else self._weights
        positive = np.where(self._labels > 0, w, 0.0)
        negative = w - positive
        of_block = self._sums(negative, self._blocks)[self._block]
        # Of rows that stand later, in the group: all negatives less those up to the block's end.
        total = self._sums(negative, self._starts)
        up_to = np.cumsum(negative)
        before_group = (up_to - negative)[self._starts]
        block_ends = np.r_[self._blocks[1:], self._count] - 1
        behind = total[self._group] - (up_to[block_ends][self._block] - before_group[self._group])
        won = self._sums(positive * (behind + of_block / 2), self._starts)
        positives = self._sums(positive, self._starts)
        pairs = positives * total
        rows = self._sums(w, self._starts)
        return self._mean(
            np.divide(won, pairs, out=np.zeros_like(won), where=pairs > 0), rows, pairs > 0
        )

    def recall_at_k(self, k: int) -> Estimate:
        """The share of a group's positive rows that are among its first ``k``, on average over groups.

        Groups without a positive row are left out.
        """
        positive = (self._labels > 0).astype(np.float64)
        found = self._first(self._shared(positive), k)
        there = self._sums(positive, self._starts)
        shares = np.divide(found, there, out=np.zeros_like(found), where=there > 0)
        return self._mean(shares, np.ones(len(there)), there > 0)

    def ndcg_at_k(self, k: int) -> Estimate:
        """Discounted cumulative gain of a group's first ``k`` rows over that of the best order, on average.

        The gain is the label, the discount ``1 / log2(1 + place)`` with places from 1 (Järvelin and
        Kekäläinen 2002, with the discount in common use).  Groups without a positive row are left out.
        """
        discount = 1.0 / np.log2(2.0 + self._rank)
        gained = self._first(self._shared(self._labels) * discount, k)
        best_order = np.lexsort((-self._labels, self._group))
        best = self._first(self._labels[best_order] * discount, k)
        shares = np.divide(gained, best, out=np.zeros_like(gained), where=best > 0)
        return self._mean(shares, np.ones(len(best)), best > 0)

    def _sums(self, values: Floats, starts: Numbers) -> Floats:
        return np.asarray(np.add.reduceat(values, starts)) if self._count else np.zeros(0)

    def _shared(self, gains: Floats) -> Floats:
        """Each row's gain on average over the orders of the rows that score as it does."""
        sizes = np.diff(np.r_[self._blocks, self._count])
        return np.asarray((self._sums(gains, self._blocks) / sizes)[self._block])

    def _first(self, values: Floats, k: int) -> Floats:
        """By group, the sum over its first ``k`` places."""
        if k < 1:
            raise ValueError(f"k={k}: give at least 1")
        return self._sums(np.where(self._rank < k, values, 0.0), self._starts)

    def _mean(self, values: Floats, weights: Floats, defined: Numbers) -> Estimate:
        """The mean over the groups that have the metric; each stands at one of its rows."""
        units = self._order[self._starts][defined]
        total = float(weights[defined].sum())
        if not total > 0:
            return undefined(0)
        values, weights = values[defined], weights[defined]
        mean = float(np.dot(weights, values)) / total
        return Estimate(value=mean, influence=weights * (values - mean) / total, units=units)
