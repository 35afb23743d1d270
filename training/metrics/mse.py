"""Mean squared error, its root, and R squared.

Shapes: predictions, labels and weights ``[T, B]``; sums ``[T]``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio


def compute_mse(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The mean squared error of sums ``[T]``, in the square of the label's unit; 0 without weights."""
    return ratio(error_sum, weighted_num_samples)


def compute_rmse(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The root of `compute_mse`, in the label's unit."""
    return compute_mse(error_sum, weighted_num_samples).sqrt()


def compute_r_squared(
    error_sum: Tensor,
    weighted_num_samples: Tensor,
    label_sum: Tensor,
    label_squared_sum: Tensor,
) -> Tensor:
    """1 minus the errors over the labels' variance; 1 where all labels are the same."""
    variance = label_squared_sum.double() - ratio(label_sum.double() ** 2, weighted_num_samples)
    return 1.0 - ratio(error_sum, variance)


def compute_error_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum ``[T]`` of squared errors."""
    return (weights.double() * (labels.double() - predictions.double()) ** 2).sum(-1)


def get_mse_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    w, y = weights.double(), labels.double()
    return {
        "error_sum": compute_error_sum(labels, predictions, weights),
        "weighted_num_samples": w.sum(-1),
        "label_sum": (w * y).sum(-1),
        "label_squared_sum": (w * y**2).sum(-1),
    }


class MSEMetricComputation(SumsComputation):
    """The sums of `MSEMetric`.

    Args:
        include_r_squared: whether R squared is reported, too.
    """

    def __init__(self, *args: Any, include_r_squared: bool = False, **kwargs: Any) -> None:
        self._include_r_squared = include_r_squared
        self._sums = ("error_sum", "weighted_num_samples")
        if include_r_squared:
            self._sums += ("label_sum", "label_squared_sum")
        super().__init__(*args, **kwargs)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        if self._include_r_squared:
            return get_mse_states(labels, predictions, weights)
        w = weights.double()
        return {
            "error_sum": compute_error_sum(labels, predictions, w),
            "weighted_num_samples": w.sum(-1),
        }

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        errors, samples, *of_labels = (sums[name] for name in self._sums)
        values: list[tuple[MetricNameBase, Tensor]] = [
            (MetricName.MSE, compute_mse(errors, samples)),
            (MetricName.RMSE, compute_rmse(errors, samples)),
        ]
        if self._include_r_squared:
            r_squared = compute_r_squared(errors, samples, *of_labels)
            values.append((MetricName.R_SQUARED, r_squared))
        return values


class MSEMetric(RecMetric):
    """Mean squared error."""

    _namespace = MetricNamespace.MSE
    _computation_class = MSEMetricComputation
