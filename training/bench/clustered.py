"""Standard errors of AUCs and of their differences, by drawing users instead of rows.

A user's rows are alike, so that an error that takes each row for a new observation is too small.  Here
whole users are drawn with replacement (the bootstrap by clusters of Cameron, Gelbach and Miller,
"Bootstrap-Based Improvements for Inference with Clustered Errors", 2008), the same users for all models,
so that the error of a difference is that of pairs.

Shapes: ``n`` rows, ``G`` users, ``R`` draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

DRAWS = 1000

Values = npt.NDArray[np.float64]


def user_weights(users: npt.NDArray[np.int64], draws: int = DRAWS, seed: int = 0) -> Values:
    """``[R, n]``: how often each row counts in each draw, ``users`` being ``[n]``."""
    _, place = np.unique(users, return_inverse=True)
    groups = int(place.max()) + 1
    random = np.random.default_rng(seed)
    counts = random.multinomial(groups, np.full(groups, 1 / groups), size=draws)
    return counts[:, place].astype(np.float64)


def weighted_auc(labels: Values, scores: Values, weights: Values) -> Values:
    """``[R]``: the AUC of scores ``[n]`` in every row of ``weights [R, n]``; a tie counts one half."""
    order = np.argsort(scores, kind="stable")
    first = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) != 0)
    positive = np.add.reduceat(weights[:, order] * labels[order], first, axis=1)
    negative = np.add.reduceat(weights[:, order] * (1 - labels[order]), first, axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    total: Values = (positive * below).sum(axis=1)
    result: Values = total / (positive.sum(axis=1) * negative.sum(axis=1))
    return result


def mean_aucs(labels: Values, models: Sequence[Values], weights: Values) -> Values:
    """``[R]``: in every draw, the mean AUC of several models' scores."""
    every = [weighted_auc(labels, scores, weights) for scores in models]
    result: Values = np.mean(every, axis=0)
    return result
