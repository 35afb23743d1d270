"""The weighted means of labels and of predictions.

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


def compute_average(weighted_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The mean of sums ``[T]``; 0 without weights."""
    return ratio(weighted_sum, weighted_num_samples)


def get_average_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    w = weights.double()
    return {
        "label_sum": (w * labels).sum(-1),
        "prediction_sum": (w * predictions).sum(-1),
        "weighted_num_samples": w.sum(-1),
    }


class AverageMetricComputation(SumsComputation):
    """The sums of `AverageMetric`."""

    _sums = ("label_sum", "prediction_sum", "weighted_num_samples")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_average_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        labels, predictions, samples = (sums[name] for name in self._sums)
        return [
            (MetricName.LABEL_AVERAGE, compute_average(labels, samples)),
            (MetricName.PREDICTION_AVERAGE, compute_average(predictions, samples)),
        ]


class AverageMetric(RecMetric):
    """The weighted means of labels and of predictions."""

    _namespace = MetricNamespace.AVERAGE
    _computation_class = AverageMetricComputation
