"""Normalised entropy with every weight taken for 1.

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
from tessera.training.metrics.ne import compute_cross_entropy, compute_ne, get_ne_states
from tessera.training.metrics.ne_sums import NESumsComputation
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums

__all__ = [
    "UnweightedNEMetric",
    "UnweightedNEMetricComputation",
    "compute_cross_entropy",
    "compute_ne",
    "get_unweighted_ne_states",
]


def get_unweighted_ne_states(
    labels: Tensor,
    predictions: Tensor,
    weights: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    eta: float,
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``, whatever its weights."""
    return get_ne_states(labels, predictions, torch.ones_like(labels), eta)


class UnweightedNEMetricComputation(NESumsComputation):
    """The sums of `UnweightedNEMetric`."""

    _sums = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_unweighted_ne_states(labels, predictions, weights, self.eta)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        entropy, samples, positives, negatives = (sums[name] for name in self._sums)
        ne = compute_ne(entropy, samples, positives, negatives, self.eta, self._allow_missing)
        return [(MetricName.UNWEIGHTED_NE, ne)]


class UnweightedNEMetric(RecMetric):
    """Normalised entropy with every weight taken for 1."""

    _namespace = MetricNamespace.UNWEIGHTED_NE
    _computation_class = UnweightedNEMetricComputation
