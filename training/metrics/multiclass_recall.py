"""Recall at k of one label among C classes, for each k: whether the label is among the k + 1 best predictions.

Shapes: predictions ``[T, B, C]``, labels (class numbers) and weights ``[T, B]``; sums ``[T, C]`` and ``[T]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation


def compute_true_positives_at_k(
    predictions: Tensor, labels: Tensor, weights: Tensor, n_classes: int
) -> Tensor:
    """The weight ``[..., C]`` of the examples whose label is among the k + 1 best, for k from 0 up.

    Args:
        predictions: ``[..., B, C]``; of equal ones the lower class comes first.
        labels: ``[..., B]``; one that is not a class is never found.
        weights: ``[..., B]``.
        n_classes: ``C``.
    """
    ranks = torch.argsort(predictions, dim=-1, descending=True, stable=True)
    found = ranks == labels.unsqueeze(-1)
    place = found.int().argmax(-1)
    weight = torch.where(found.any(-1), weights.double(), 0.0)
    at_place = functional.one_hot(place, n_classes) * weight.unsqueeze(-1)
    return at_place.sum(-2).cumsum(-1)


def compute_multiclass_recall_at_k(tp_at_k: Tensor, total_weights: Tensor) -> Tensor:
    """The recalls ``[..., C]`` of sums; NaN without weights."""
    return tp_at_k / total_weights.unsqueeze(-1)


def get_multiclass_recall_states(
    predictions: Tensor, labels: Tensor, weights: Tensor, n_classes: int
) -> dict[str, Tensor]:
    """What a batch adds to the sums."""
    return {
        "tp_at_k": compute_true_positives_at_k(predictions, labels, weights, n_classes),
        "total_weights": weights.double().sum(-1),
    }


class MulticlassRecallMetricComputation(SumsComputation):
    """The sums of `MulticlassRecallMetric`.

    Args:
        number_of_classes: ``C``.
    """

    _sums = ("tp_at_k", "total_weights")

    def __init__(self, *args: Any, number_of_classes: int, **kwargs: Any) -> None:
        self._n_classes = number_of_classes
        super().__init__(*args, **kwargs)

    def _width(self, name: str, /) -> tuple[int, ...]:
        return (self._n_classes,) if name == "tp_at_k" else ()

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_multiclass_recall_states(predictions, labels, weights, self._n_classes)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        found, total = (sums[name] for name in self._sums)
        return [(MetricName.MULTICLASS_RECALL, compute_multiclass_recall_at_k(found, total))]


class MulticlassRecallMetric(RecMetric):
    """Recall at k among classes, ``[C]`` numbers of each task."""

    _namespace = MetricNamespace.MULTICLASS_RECALL
    _computation_class = MulticlassRecallMetricComputation
