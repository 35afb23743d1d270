"""The share of the normalised entropy that positive labels have: only their cross entropy counts.

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
from tessera.training.metrics.ne import compute_ne, get_ne_states
from tessera.training.metrics.ne_sums import NESumsComputation
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums


def compute_cross_entropy_positive(
    labels: Tensor, predictions: Tensor, weights: Tensor, eta: float
) -> Tensor:
    """The positive part of each example's weighted cross entropy, ``[T, B]`` float64, in bits."""
    p = predictions.double().clamp(min=eta, max=1.0 - eta)
    return -weights.double() * labels.double() * torch.log2(p)


def get_ne_positive_states(
    labels: Tensor, predictions: Tensor, weights: Tensor, eta: float
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    states = get_ne_states(labels, predictions, weights, eta)
    del states["cross_entropy_sum"]
    positive = compute_cross_entropy_positive(labels, predictions, weights, eta)
    return {"cross_entropy_positive_sum": positive.sum(-1), **states}


def compute_ne_positive(  # noqa: PLR0917 - the signature TorchRec users know
    ce_positive_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    eta: float,
    allow_missing_label_with_zero_weight: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """As `compute_ne`, of the cross entropy of positive labels."""
    return compute_ne(
        ce_positive_sum,
        weighted_num_samples,
        pos_labels,
        neg_labels,
        eta,
        allow_missing_label_with_zero_weight,
    )


class NEPositiveMetricComputation(NESumsComputation):
    """The sums of `NEPositiveMetric`."""

    _sums = ("cross_entropy_positive_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_ne_positive_states(labels, predictions, weights, self.eta)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        entropy, samples, positives, negatives = (sums[name] for name in self._sums)
        ne = compute_ne_positive(
            entropy, samples, positives, negatives, self.eta, self._allow_missing
        )
        return [(MetricName.NE_POSITIVE, ne)]


class NEPositiveMetric(RecMetric):
    """The cross entropy of positive labels over the entropy of the mean label."""

    _namespace = MetricNamespace.NE_POSITIVE
    _computation_class = NEPositiveMetricComputation
