"""Metrics of labels that are numbers: predictions and labels ``[N]``, in the label's unit."""

from __future__ import annotations

import math

import numpy as np

from tessera.training.metrics.binary import Metric, calibration
from tessera.training.metrics.estimate import Estimate, Floats, Numbers, mean_of, undefined


def mean_squared_error(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None
) -> Estimate:
    """In the square of the label's unit."""
    return mean_of(_errors(predictions, labels) ** 2, weights)


def root_mean_squared_error(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None
) -> Estimate:
    """The root of `mean_squared_error`, in the label's unit."""
    squared = mean_squared_error(predictions, labels, weights)
    value = math.sqrt(squared.value)
    slope = 1.0 / (2.0 * value) if value else 0.0
    return Estimate(value=value, influence=slope * squared.influence)


def mean_absolute_error(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None
) -> Estimate:
    """In the label's unit."""
    return mean_of(np.abs(_errors(predictions, labels)), weights)


def r_squared(predictions: Numbers, labels: Numbers, weights: Numbers | None = None) -> Estimate:
    """1 minus the mean squared error over the labels' variance; NaN where all labels are the same."""
    squared = mean_squared_error(predictions, labels, weights)
    y = labels.astype(np.float64)
    variance = mean_of((y - mean_of(y, weights).value) ** 2, weights)
    if not variance.value > 0:
        return undefined(len(labels))
    share = squared.value / variance.value
    influence = (share * variance.influence - squared.influence) / variance.value
    return Estimate(value=1.0 - share, influence=influence)


def _errors(predictions: Numbers, labels: Numbers) -> Floats:
    return predictions.astype(np.float64) - labels.astype(np.float64)


REGRESSION_METRICS: dict[str, Metric] = {
    "mean_squared_error": mean_squared_error,
    "root_mean_squared_error": root_mean_squared_error,
    "mean_absolute_error": mean_absolute_error,
    "r_squared": r_squared,
    "calibration": calibration,
}
"""All metrics of a label that is a number, by name."""
