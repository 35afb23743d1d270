"""The share of positive labels among the best predictions of each session."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.session_ranks import (
    SessionMetric,
    SessionSumsComputation,
    ranking_within_session,
)
from tessera.training.metrics.sums import Sums, ratio

__all__ = ["PrecisionSessionMetric", "PrecisionSessionMetricComputation", "ranking_within_session"]


class PrecisionSessionMetricComputation(SessionSumsComputation):
    """The sums of `PrecisionSessionMetric`."""

    _sums = ("num_true_pos", "num_false_pos")

    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        best, labels = self._chosen(predictions, labels, kwargs)
        weights = weights.double()
        return {
            "num_true_pos": (weights * labels * best).sum(-1),
            "num_false_pos": (weights * (1.0 - labels) * best).sum(-1),
        }

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        found, wrong = (sums[name] for name in self._sums)
        return [(MetricName.PRECISION_SESSION_LEVEL, ratio(found, found + wrong, math.nan))]


class PrecisionSessionMetric(SessionMetric):
    """The share of positive labels among the best predictions of each session; NaN without predictions."""

    _namespace = MetricNamespace.PRECISION_SESSION_LEVEL
    _computation_class = PrecisionSessionMetricComputation
