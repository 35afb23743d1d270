"""The weighted mean prediction.

Shapes: predictions, labels and weights ``[T, B]``; sums ``[T]``.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio


def get_mean(value_sum: Tensor, num_samples: Tensor) -> Tensor:
    """The mean of sums ``[T]``; NaN without weights."""
    return ratio(value_sum, num_samples, math.nan)


class WeightedAvgMetricComputation(SumsComputation):
    """The sums of `WeightedAvgMetric`."""

    _sums = ("weighted_sum", "weighted_num_samples")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,  # noqa: ARG002
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return {
            "weighted_sum": (weights.double() * predictions).sum(-1),
            "weighted_num_samples": weights.double().sum(-1),
        }

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        values, samples = (sums[name] for name in self._sums)
        return [(MetricName.WEIGHTED_AVG, get_mean(values, samples))]


class WeightedAvgMetric(RecMetric):
    """The weighted mean prediction."""

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = WeightedAvgMetricComputation
