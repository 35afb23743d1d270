"""Precision: the share of positive labels among the examples that are predicted to be positive.

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


def compute_precision(num_true_positives: Tensor, num_false_positives: Tensor) -> Tensor:
    """The precision of sums ``[T]``; 0 where nothing is predicted to be positive."""
    return ratio(num_true_positives, num_true_positives + num_false_positives)


def compute_true_pos_sum(
    labels: Tensor, predictions: Tensor, weights: Tensor, threshold: float = 0.5
) -> Tensor:
    """The weights ``[T]`` of positive examples that are predicted to be positive."""
    predicted = predictions.double() >= threshold
    return (weights.double() * predicted * labels.double()).sum(-1)


def compute_false_pos_sum(
    labels: Tensor, predictions: Tensor, weights: Tensor, threshold: float = 0.5
) -> Tensor:
    """The weights ``[T]`` of negative examples that are predicted to be positive."""
    predicted = predictions.double() >= threshold
    return (weights.double() * predicted * (1.0 - labels.double())).sum(-1)


def get_precision_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None, threshold: float = 0.5
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``; without weights each example counts 1."""
    weights = torch.ones_like(predictions) if weights is None else weights
    return {
        "true_pos_sum": compute_true_pos_sum(labels, predictions, weights, threshold),
        "false_pos_sum": compute_false_pos_sum(labels, predictions, weights, threshold),
    }


class PrecisionMetricComputation(SumsComputation):
    """The sums of `PrecisionMetric`.

    Args:
        threshold: predictions from it up are of class 1.
    """

    _sums = ("true_pos_sum", "false_pos_sum")

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
        return get_precision_states(labels, predictions, weights, self._threshold)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        found, wrong = (sums[name] for name in self._sums)
        return [(MetricName.PRECISION, compute_precision(found, wrong))]


class PrecisionMetric(RecMetric):
    """The share of positive labels among the examples that are predicted to be positive."""

    _namespace = MetricNamespace.PRECISION
    _computation_class = PrecisionMetricComputation
