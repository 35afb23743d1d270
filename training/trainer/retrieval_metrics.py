"""Recall and NDCG of each user's best items, out of all items.

Shapes: ``Q`` queries, ``I`` items, ``D`` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tessera.training.trainer.metrics import json_of

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RetrievalEvaluation:
    """How good the best ``k`` of all items of the training rows are.

    Attributes:
        k: items of a query.
        queries: users of the split's positive rows, or these rows where the data has no ``user_id``.
        recall: mean over the queries of the share of their relevant items that are among the best
            ``k``.  An item that no training row has is relevant all the same, and cannot be found.
        ndcg: the mean of the normalised discounted cumulative gain of the best ``k``: 1 / log2(1 +
            rank) for each relevant one, over what the best order would give.
        unknown_items: share of the relevant items that no training row has.
    """

    k: int
    queries: int
    recall: float
    ndcg: float
    unknown_items: float

    def to_json(self) -> dict[str, int | float | None]:
        """``recall@K``, ``ndcg@K`` and the other fields by name."""
        return json_of(
            {
                f"recall@{self.k}": self.recall,
                f"ndcg@{self.k}": self.ndcg,
                "queries": self.queries,
                "unknown_items": self.unknown_items,
            }
        )


def best_items(users: Floats, items: Floats, k: int, excluded: Sequence[Ids] | None = None) -> Ids:
    """``[Q, min(k, I)]``: of each user's vector ``[Q, D]`` the items with the largest products, best first.

    ``excluded`` are, by query, places of items that it is not given; where too few are left, -1.
    Of equal products the earlier item counts as better.
    """
    scores = users @ items.T
    if excluded is not None:
        for row, places in enumerate(excluded):
            scores[row, places] = -np.inf
    k = min(k, len(items))
    if k < len(items):
        # Everything as good as the k-th, so that ties are settled by the place below.
        bound = np.partition(scores, len(items) - k, axis=1)[:, [len(items) - k]]
        scores = np.where(scores >= bound, scores, -np.inf)
    order: Ids = np.argsort(-scores, axis=1, kind="stable")[:, :k].astype(np.int64)
    order[np.isneginf(np.take_along_axis(scores, order, axis=1))] = -1
    return order


def gains(found: Ids, relevant: Sequence[Ids], missing: Ids, k: int) -> npt.NDArray[np.float64]:
    """``[Q, 2]``: recall and NDCG of each query.

    Args:
        found: ``[Q, up to k]`` items, best first; -1: none.
        relevant: by query, its different relevant items.
        missing: ``[Q]``: how many relevant items more there are, which cannot be found.
        k: items of a query.
    """
    discounts = 1.0 / np.log2(np.arange(2, k + 2))
    best = np.concatenate([[0.0], np.cumsum(discounts)])
    result: Any = np.zeros((len(found), 2))
    for row, own in enumerate(relevant):
        hit = np.isin(found[row], own) & (found[row] >= 0)
        total = len(own) + int(missing[row])
        result[row, 0] = hit.sum() / total
        result[row, 1] = discounts[: len(hit)][hit].sum() / best[min(total, k)]
    out: npt.NDArray[np.float64] = result
    return out
