"""The sum of the weights.

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


def compute_weighted_sum(
    labels: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    weights: Tensor,
) -> Tensor:
    """The sum of the weights, ``[T]`` float64."""
    return weights.double().sum(-1)


def get_weighted_sum_states(
    labels: Tensor, predictions: Tensor, weights: Tensor | None
) -> dict[str, Tensor]:
    """What a batch adds to the sum; ``weights`` None: 1."""
    weights = torch.ones_like(labels) if weights is None else weights
    return {"weighted_sum": compute_weighted_sum(labels, predictions, weights)}


class SumWeightsMetricComputation(SumsComputation):
    """The sum of `SumWeightsMetric`."""

    _sums = ("weighted_sum",)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_weighted_sum_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(MetricName.SUM_WEIGHTS, sums["weighted_sum"].clone())]


class SumWeightsMetric(RecMetric):
    """The sum of the weights."""

    _namespace = MetricNamespace.SUM_WEIGHTS
    _computation_class = SumWeightsMetricComputation
