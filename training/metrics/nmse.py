"""The mean squared error over that of a prediction of 1 for each example, and the same of the roots.

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
from tessera.training.metrics.mse import (
    compute_error_sum,
    compute_mse,
    compute_rmse,
    get_mse_states,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio


def compute_norm(model_error_sum: Tensor, baseline_error_sum: Tensor) -> Tensor:
    """The quotient of two errors ``[T]``; 0 where the second is 0."""
    return ratio(model_error_sum, baseline_error_sum)


def get_norm_mse_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    return {
        **get_mse_states(labels, predictions, weights),
        "const_pred_error_sum": compute_error_sum(labels, torch.ones_like(labels), weights),
    }


class NMSEMetricComputation(SumsComputation):
    """The sums of `NMSEMetric`."""

    _sums = ("error_sum", "weighted_num_samples", "const_pred_error_sum")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        states = get_norm_mse_states(labels, predictions, weights)
        return {name: states[name] for name in self._sums}

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        errors, samples, baseline = (sums[name] for name in self._sums)
        return [
            (
                MetricName.NMSE,
                compute_norm(compute_mse(errors, samples), compute_mse(baseline, samples)),
            ),
            (
                MetricName.NRMSE,
                compute_norm(compute_rmse(errors, samples), compute_rmse(baseline, samples)),
            ),
        ]


class NMSEMetric(RecMetric):
    """The mean squared error over that of predicting 1."""

    _namespace = MetricNamespace.NMSE
    _computation_class = NMSEMetricComputation
