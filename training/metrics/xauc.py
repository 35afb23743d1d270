"""XAUC: the weighted share of pairs of examples that predictions and labels put in the same order.

A pair counts where both rise, both fall, or both are equal; its weight is the product of its examples' weights.  Only
pairs inside a batch are looked at.  Of labels that are numbers, such as watch times.

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
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio

_PAIRS_AT_ONCE = 1 << 22  # so that a large batch needs some tens of megabytes


def compute_xauc(error_sum: Tensor, weighted_num_pairs: Tensor) -> Tensor:
    """The share of sums ``[T]``; 0 without pairs."""
    return ratio(error_sum, weighted_num_pairs)


def compute_error_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weight ``[T]`` of the pairs in the same order."""
    predictions, w = predictions.double(), weights.double()
    count = labels.shape[-1]
    total = torch.zeros(labels.shape[0], dtype=torch.double, device=labels.device)
    rows = max(_PAIRS_AT_ONCE // max(count, 1), 1)
    for begin in range(0, count, rows):
        own = slice(begin, begin + rows)
        alike = _order(predictions, own) == _order(labels, own)
        later = torch.arange(count, device=labels.device)
        alike &= later > later[own, None]
        total += (alike * w[:, own, None] * w[:, None, :]).sum((-1, -2))
    return total


def _order(values: Tensor, own: slice) -> Tensor:
    """1, 0 or -1 for each of some examples against every other, ``[T, some, B]``."""
    mine, others = values[:, own, None], values[:, None, :]
    return (mine > others).to(torch.int8) - (mine < others).to(torch.int8)


def compute_weighted_num_pairs(weights: Tensor) -> Tensor:
    """The weight ``[T]`` of all pairs: half of what the sum's square has beside the squares."""
    w = weights.double()
    return (w.sum(-1) ** 2 - (w**2).sum(-1)) / 2


def get_xauc_states(labels: Tensor, predictions: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    return {
        "error_sum": compute_error_sum(labels, predictions, weights),
        "weighted_num_pairs": compute_weighted_num_pairs(weights),
    }


class XAUCMetricComputation(SumsComputation):
    """The sums of `XAUCMetric`."""

    _sums = ("error_sum", "weighted_num_pairs")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_xauc_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        alike, pairs = (sums[name] for name in self._sums)
        return [(MetricName.XAUC, compute_xauc(alike, pairs))]


class XAUCMetric(RecMetric):
    """The weighted share of pairs in the same order."""

    _namespace = MetricNamespace.XAUC
    _computation_class = XAUCMetricComputation
