"""The sum of predictions times weights; a prediction that is NaN counts 0.

Shapes: predictions, labels and weights ``[T, B]``; the sum ``[T]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation


def compute_weighted_predictions_sum(
    labels: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Tensor,
    weights: Tensor,
) -> Tensor:
    """The sum of predictions times weights; a prediction that is NaN counts 0, ``[T]`` float64."""
    return (weights.double() * torch.nan_to_num(predictions)).sum(-1)


def get_weighted_sum_prediction_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """What a batch adds to the sum; ``weights`` None: 1."""
    weights = torch.ones_like(labels) if weights is None else weights
    return {
        "weighted_predictions_sum": compute_weighted_predictions_sum(labels, predictions, weights)
    }


class WeightedSumPredictionsMetricComputation(SumsComputation):
    """The sum of `WeightedSumPredictionsMetric`."""

    _sums = ("weighted_predictions_sum",)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_weighted_sum_prediction_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(MetricName.WEIGHTED_SUM_PREDICTIONS, sums["weighted_predictions_sum"].clone())]


class WeightedSumPredictionsMetric(RecMetric):
    """The sum of predictions times weights; a prediction that is NaN counts 0."""

    _namespace = MetricNamespace.WEIGHTED_SUM_PREDICTIONS
    _computation_class = WeightedSumPredictionsMetricComputation
