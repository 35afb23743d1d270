"""Metrics of labels that are numbers: predictions and labels ``[N]``, in the label's unit."""

from __future__ import annotations

import math

import numpy as np

from tessera.training.metrics.binary import calibration
from tessera.training.metrics.estimate import Estimate, Numbers, mean_of, undefined


def regression_estimates(
    predictions: Numbers, labels: Numbers, weights: Numbers | None = None
) -> dict[str, Estimate]:
    """All metrics by name; R squared is NaN where all labels are the same."""
    p, y = predictions.astype(np.float64), labels.astype(np.float64)
    errors = p - y
    squared = mean_of(errors**2, weights)
    return {
        "mean_squared_error": squared,
        "root_mean_squared_error": _root(squared),
        "mean_absolute_error": mean_of(np.abs(errors), weights),
        "r_squared": _r_squared(squared, y, weights),
        "calibration": calibration(p, y, weights),
    }


def _root(squared: Estimate) -> Estimate:
    value = math.sqrt(squared.value)
    slope = 1.0 / (2.0 * value) if value else 0.0
    return Estimate(value=value, influence=slope * squared.influence)


def _r_squared(squared: Estimate, labels: Numbers, weights: Numbers | None) -> Estimate:
    """1 minus the mean squared error over the labels' variance."""
    mean = mean_of(labels, weights).value
    variance = mean_of((labels - mean) ** 2, weights)
    if not variance.value > 0:
        return undefined(len(labels))
    share = squared.value / variance.value
    influence = (share * variance.influence - squared.influence) / variance.value
    return Estimate(value=1.0 - share, influence=influence)
