"""The sum of the weights of examples whose label is missing, which is NaN.

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


def compute_missing_label_sum(
    labels: Tensor,
    predictions: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    weights: Tensor,
) -> Tensor:
    """The sum of the weights of examples whose label is missing, which is NaN, ``[T]`` float64."""
    return torch.where(torch.isnan(labels), weights.double(), 0.0).sum(-1)


def get_num_missing_labels_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """What a batch adds to the sum; ``weights`` None: 1."""
    weights = torch.ones_like(labels) if weights is None else weights
    return {"missing_label_sum": compute_missing_label_sum(labels, predictions, weights)}


class NumMissingLabelsMetricComputation(SumsComputation):
    """The sum of `NumMissingLabelsMetric`."""

    _sums = ("missing_label_sum",)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_num_missing_labels_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(MetricName.NUM_MISSING_LABELS, sums["missing_label_sum"].clone())]


class NumMissingLabelsMetric(RecMetric):
    """The sum of the weights of examples whose label is missing, which is NaN."""

    _namespace = MetricNamespace.NUM_MISSING_LABELS
    _computation_class = NumMissingLabelsMetricComputation
