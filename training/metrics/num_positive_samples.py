"""The sum of labels times weights; a label that is NaN counts 0.

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


def compute_weighted_pos_sum(
    labels: Tensor,
    predictions: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    weights: Tensor,
) -> Tensor:
    """The sum of labels times weights; a label that is NaN counts 0, ``[T]`` float64."""
    return (weights.double() * torch.nan_to_num(labels)).sum(-1)


def get_num_positive_sample_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """What a batch adds to the sum; ``weights`` None: 1."""
    weights = torch.ones_like(labels) if weights is None else weights
    return {"weighted_pos_sum": compute_weighted_pos_sum(labels, predictions, weights)}


class NumPositiveSamplesMetricComputation(SumsComputation):
    """The sum of `NumPositiveSamplesMetric`."""

    _sums = ("weighted_pos_sum",)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_num_positive_sample_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(MetricName.NUM_POSITIVE_SAMPLES, sums["weighted_pos_sum"].clone())]


class NumPositiveSamplesMetric(RecMetric):
    """The sum of labels times weights; a label that is NaN counts 0."""

    _namespace = MetricNamespace.NUM_POSITIVE_SAMPLES
    _computation_class = NumPositiveSamplesMetricComputation
