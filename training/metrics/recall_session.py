"""The share of positive labels that are among the best predictions of their session."""

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

__all__ = ["RecallSessionMetric", "RecallSessionMetricComputation", "ranking_within_session"]


class RecallSessionMetricComputation(SessionSumsComputation):
    """The sums of `RecallSessionMetric`."""

    _sums = ("num_true_pos", "num_false_neg")

    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        best, labels = self._chosen(predictions, labels, kwargs)
        weights = weights.double()
        return {
            "num_true_pos": (weights * labels * best).sum(-1),
            "num_false_neg": (weights * labels * (1.0 - best)).sum(-1),
        }

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        found, missed = (sums[name] for name in self._sums)
        return [(MetricName.RECALL_SESSION_LEVEL, ratio(found, found + missed, math.nan))]


class RecallSessionMetric(SessionMetric):
    """The share of positive labels that are among the best predictions of their session; NaN without positive labels."""

    _namespace = MetricNamespace.RECALL_SESSION_LEVEL
    _computation_class = RecallSessionMetricComputation
