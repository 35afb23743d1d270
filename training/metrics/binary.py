"""Metrics of labels that are 0 or 1.

``N`` rows; labels ``[N]``; predictions are probabilities ``[N]``, scores anything that ranks rows.
Weights ``[N]``, where they are taken, say how many rows a row stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tessera.training.metrics.estimate import Estimate, Floats, Numbers, mean_of, undefined


def auc(scores: Numbers, labels: Numbers) -> float:
    """Exact area under the ROC curve of scores ``[N]`` and labels ``[N]``; NaN for one class.

    Counts ordered pairs in integers, so the result does not depend on the order of the rows
    and is exact up to the last division for any N below 2**31.
    """
    order = np.argsort(scores, kind="stable")
    sorted_scores = scores[order]
    positive = (labels[order] != 0).astype(np.int64)
    # The first row of every group of equal scores.
    starts = np.flatnonzero(np.r_[True, sorted_scores[1:] != sorted_scores[:-1]][: len(scores)])
    if len(starts) == 0:
        return math.nan
    positives = np.add.reduceat(positive, starts)
    negatives = np.diff(np.r_[starts, len(scores)]) - positives
    negatives_below = np.cumsum(negatives) - negatives
    pairs = int(positives.sum()) * int(negatives.sum())
    if pairs == 0:
        return math.nan
    won_twice = int(np.sum(positives * (2 * negatives_below + negatives)))
    return won_twice / (2 * pairs)


def auc_estimate(scores: Numbers, labels: Numbers, weights: Numbers | None = None) -> Estimate:
    """The AUC, ties counting one half, a pair of rows counting the product of their weights.

    What a positive row adds is the share of negatives that it outranks, less the AUC; what a negative
    one adds, the share of positives that outrank it (the structural components of DeLong et al. 1988).
    """
    count = len(scores)
    positive = np.asarray(labels) != 0
    w = np.ones(count) if weights is None else np.asarray(weights, np.float64)
    of_positives, of_negatives = float(w[positive].sum()), float(w[~positive].sum())
    if not of_positives > 0 or not of_negatives > 0:
        return undefined(count)
    order = np.argsort(scores, kind="stable")
    ranked = np.asarray(scores)[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    block = np.cumsum(np.r_[False, ranked[1:] != ranked[:-1]])
    won = np.empty(count)
    for own, other in ((positive, ~positive), (~positive, positive)):
        by_block = np.add.reduceat(np.where(other, w, 0.0)[order], starts)
        below = np.cumsum(by_block) - by_block
        share = (below + by_block / 2)[block]
        of_own = np.empty(count)
        of_own[order] = share
        won[own] = of_own[own]
    won[positive] /= of_negatives
    won[~positive] = 1.0 - won[~positive] / of_positives
    weighted = float(np.dot(w[positive], won[positive])) / of_positives
    value = auc(np.asarray(scores), np.asarray(labels)) if weights is None else weighted
    side = np.where(positive, of_positives, of_negatives)
    return Estimate(value=value, influence=w * (won - value) / side)


def binary_entropy(rate: float) -> float:
    """Entropy in nats of a coin that shows 1 with probability ``rate``, which is in (0, 1)."""
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def sigmoid(logits: Numbers) -> Floats:
    """The logistic function in float64, without overflow for any input; ``[N] -> [N]``."""
    x = logits.astype(np.float64)
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))


def row_log_loss(predictions: Numbers, labels: Numbers) -> Floats:
    """``[N]`` negative log likelihoods, in nats.

    A prediction of exactly 0 or 1 is moved inside by the resolution of its type, so that each is finite.
    """
    resolution = float(np.finfo(predictions.dtype).eps)
    p = np.clip(predictions.astype(np.float64), resolution, 1.0 - resolution)
    y = labels.astype(np.float64)
    return -(y * np.log(p) + (1.0 - y) * np.log1p(-p))


def row_log_loss_of_logits(logits: Numbers, labels: Numbers) -> Floats:
    """``[N]`` negative log likelihoods of logits ``[N]``, in nats; nothing is clipped."""
    x = logits.astype(np.float64)
    return np.logaddexp(0.0, x) - x * labels


def log_loss(predictions: Numbers, labels: Numbers, weights: Numbers | None = None) -> Estimate:
    """The mean of `row_log_loss`, in nats."""
    return mean_of(row_log_loss(predictions, labels), weights)


def normalised_entropy(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None
) -> Estimate:
    """Log loss over the entropy of the mean label: below 1 is better than to predict the mean.

    He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook".  NaN for one class.
    """
    loss, rate = log_loss(predictions, labels, weights), mean_of(labels, weights)
    if not 0.0 < rate.value < 1.0:
        return undefined(len(labels))
    entropy = binary_entropy(rate.value)
    slope = math.log1p(-rate.value) - math.log(rate.value)
    influence = loss.influence / entropy - loss.value * slope / entropy**2 * rate.influence
    return Estimate(value=loss.value / entropy, influence=influence)


def calibration(predictions: Numbers, labels: Numbers, weights: Numbers | None = None) -> Estimate:
    """Mean prediction over mean label: above 1 the model promises too much; NaN where the latter is 0."""
    predicted, seen = mean_of(predictions, weights), mean_of(labels, weights)
    if not seen.value:
        return undefined(len(labels))
    value = predicted.value / seen.value
    return Estimate(
        value=value, influence=(predicted.influence - value * seen.influence) / seen.value
    )


def accuracy(predictions: Numbers, labels: Numbers, weights: Numbers | None = None) -> Estimate:
    """The share of rows whose prediction is on the label's side of one half (one half: label 1)."""
    return mean_of((np.asarray(predictions) >= 0.5) == (np.asarray(labels) != 0), weights)


Metric = Callable[[Numbers, Numbers, Numbers | None], Estimate]
"""A function of predictions, labels and weights, each ``[N]``."""

BINARY_METRICS: dict[str, Metric] = {
    "auc": auc_estimate,
    "log_loss": log_loss,
    "normalised_entropy": normalised_entropy,
    "calibration": calibration,
    "accuracy": accuracy,
}
"""All metrics of a label that is 0 or 1, by name."""


@dataclass(frozen=True, kw_only=True)
class CalibrationTable:
    """Rows cut into ``K`` parts by prediction; each array ``[K]``.

    Attributes:
        rows: how many there are.
        weight: the sum of their weights.
        predicted: their mean prediction.
        observed: their mean label.
    """

    rows: npt.NDArray[np.int64]
    weight: Floats
    predicted: Floats
    observed: Floats


def calibration_table(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None, *, bins: int
) -> CalibrationTable:
    """Rows sorted by prediction and cut into at most ``bins`` parts of (nearly) as many rows.

    A part whose weights are all 0 is left out.
    """
    order = np.argsort(predictions, kind="stable")
    w = np.ones(len(order)) if weights is None else np.asarray(weights, np.float64)
    parts = [part for part in np.array_split(order, bins) if float(w[part].sum()) > 0]

    def mean(values: Numbers) -> Floats:
        return np.array(
            [np.average(values[part].astype(np.float64), weights=w[part]) for part in parts]
        )

    return CalibrationTable(
        rows=np.array([len(part) for part in parts], np.int64),
        weight=np.array([w[part].sum() for part in parts]),
        predicted=mean(predictions),
        observed=mean(labels),
    )


@dataclass(frozen=True, kw_only=True)
class Curves:
    """What every threshold of a score gives; each array has a place for each different score, highest first.

    Attributes:
        false_positive_rate: the share of negatives at or above the threshold, after a first 0.
        true_positive_rate: the share of positives; also the recall, after a first 0.
        precision: the share of positives among the rows at or above; its first is its second.
    """

    false_positive_rate: Floats
    true_positive_rate: Floats
    precision: Floats


def curves(scores: Numbers, labels: Numbers, weights: Numbers | None = None) -> Curves | None:
    """The ROC and the precision-recall curve; None for one class."""
    order = np.argsort(scores, kind="stable")[::-1]
    ranked, positive = np.asarray(scores)[order], np.asarray(labels)[order] != 0
    w = np.ones(len(order)) if weights is None else np.asarray(weights, np.float64)[order]
    ends = np.flatnonzero(np.r_[ranked[1:] != ranked[:-1], True][: len(ranked)])
    hits, misses = np.cumsum(w * positive)[ends], np.cumsum(w * ~positive)[ends]
    if not len(ends) or not hits[-1] > 0 or not misses[-1] > 0:
        return None
    total = hits + misses
    precision = np.divide(hits, total, out=np.ones_like(hits), where=total > 0)
    return Curves(
        false_positive_rate=np.r_[0.0, misses / misses[-1]],
        true_positive_rate=np.r_[0.0, hits / hits[-1]],
        precision=np.r_[precision[0], precision],
    )
