"""Normalised entropy over the entropy that the mean prediction has against the labels.

A model whose predictions are all off by one factor has a high NE; here that part is divided out.

Shapes: predictions (probabilities), labels in [0, 1] and weights ``[T, B]``; sums ``[T]``.
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
from tessera.training.metrics.ne import ETA, compute_cross_entropy, compute_ne, get_ne_states
from tessera.training.metrics.ne_sums import NESumsComputation
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums

__all__ = [
    "CaliFreeNEMetric",
    "CaliFreeNEMetricComputation",
    "compute_cali_free_ne",
    "compute_cross_entropy",
    "get_cali_free_ne_states",
]


def get_cali_free_ne_states(
    labels: Tensor, predictions: Tensor, weights: Tensor, eta: float
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    return {
        **get_ne_states(labels, predictions, weights, eta),
        "weighted_sum_predictions": (weights.double() * predictions).sum(-1),
    }


def compute_cali_free_ne(  # noqa: PLR0917 - the signature TorchRec users know
    ce_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    weighted_sum_predictions: Tensor,
    eta: float,
    allow_missing_label_with_zero_weight: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """The value of sums ``[T]``; without weights NaN, or ``eta`` where the last argument says so."""
    ne = compute_ne(ce_sum, weighted_num_samples, pos_labels, neg_labels, eta)
    mean = weighted_sum_predictions / weighted_num_samples
    of_mean = -pos_labels * torch.log2(mean)
    of_mean = of_mean - (weighted_num_samples - pos_labels) * torch.log2(1.0 - mean)
    value = ne / of_mean
    none = weighted_num_samples == 0
    return torch.where(none, eta, value) if allow_missing_label_with_zero_weight else value


class CaliFreeNEMetricComputation(NESumsComputation):
    """The sums of `CaliFreeNEMetric`."""

    _sums = (
        "cross_entropy_sum",
        "weighted_num_samples",
        "pos_labels",
        "neg_labels",
        "weighted_sum_predictions",
    )

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_cali_free_ne_states(labels, predictions, weights, ETA)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        entropy, samples, positives, negatives, predicted = (sums[name] for name in self._sums)
        value = compute_cali_free_ne(
            entropy, samples, positives, negatives, predicted, self.eta, self._allow_missing
        )
        return [(MetricName.CALI_FREE_NE, value)]


class CaliFreeNEMetric(RecMetric):
    """Normalised entropy without the part that a wrong mean prediction makes."""

    _namespace = MetricNamespace.CALI_FREE_NE
    _computation_class = CaliFreeNEMetricComputation
