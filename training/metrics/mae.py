"""Mean absolute error, in the label's unit.

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


def compute_mae(error_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The mean error of sums ``[T]``; 0 without weights."""
    return ratio(error_sum, weighted_num_samples)


def compute_error_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum ``[T]`` of absolute errors."""
    return (weights.double() * (labels.double() - predictions.double()).abs()).sum(-1)


def get_mae_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    return {
        "error_sum": compute_error_sum(labels, predictions, weights),
        "weighted_num_samples": weights.double().sum(-1),
    }


class MAEMetricComputation(SumsComputation):
    """The sums of `MAEMetric`."""

    _sums = ("error_sum", "weighted_num_samples")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_mae_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        errors, samples = (sums[name] for name in self._sums)
        return [(MetricName.MAE, compute_mae(errors, samples))]


class MAEMetric(RecMetric):
    """Mean absolute error."""

    _namespace = MetricNamespace.MAE
    _computation_class = MAEMetricComputation
