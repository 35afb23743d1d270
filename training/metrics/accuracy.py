"""Accuracy: the share of examples whose prediction is on the label's side of a threshold.

Shapes: predictions, labels and weights ``[T, B]``; sums ``[T]``.
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
from tessera.training.metrics.sums import Sums, SumsComputation, ratio


def compute_accuracy(accuracy_sum: Tensor, weighted_num_samples: Tensor) -> Tensor:
    """The accuracy of sums ``[T]``; 0 without weights."""
    return ratio(accuracy_sum, weighted_num_samples)


def compute_accuracy_sum(
    labels: Tensor, predictions: Tensor, weights: Tensor, threshold: float = 0.5
) -> Tensor:
    """The weights ``[T]`` of the examples that are right; a prediction at the threshold says 1."""
    return (weights.double() * ((predictions.double() >= threshold) == labels)).sum(-1)


def get_accuracy_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float = 0.5
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``; without weights each example counts 1."""
    weights = torch.ones_like(predictions) if weights is None else weights
    return {
        "accuracy_sum": compute_accuracy_sum(labels, predictions, weights, threshold),
        "weighted_num_samples": weights.double().sum(-1),
    }


class AccuracyMetricComputation(SumsComputation):
    """The sums of `AccuracyMetric`.

    Args:
        threshold: predictions from it up are of class 1.
    """

    _sums = ("accuracy_sum", "weighted_num_samples")

    def __init__(self, *args: Any, threshold: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._threshold = threshold

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_accuracy_states(labels, predictions, weights, self._threshold)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        right, samples = (sums[name] for name in self._sums)
        return [(MetricName.ACCURACY, compute_accuracy(right, samples))]


class AccuracyMetric(RecMetric):
    """The share of examples whose prediction is on the label's side of a threshold."""

    _namespace = MetricNamespace.ACCURACY
    _computation_class = AccuracyMetricComputation
