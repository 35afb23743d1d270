"""Normalised entropy (NE): the cross entropy of the predictions over that of the mean label.

He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook".  Below 1 is better than to
predict the mean.  `tessera.training.metrics.binary.normalised_entropy` is that of a whole evaluation, with
its standard error; here are sums that can be kept while a model is trained.

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
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, sums_together

ETA = 1e-12


def compute_cross_entropy(
    labels: Tensor, predictions: Tensor, weights: Tensor, eta: float
) -> Tensor:
    """The weighted cross entropy of each example, ``[T, B]`` float64, in bits.

    Predictions are moved into ``[eta, 1 - eta]``.
    """
    y = labels.double()
    return _cross_entropy(y, 1.0 - y, predictions, weights.double(), eta)


def _cross_entropy(
    y: Tensor, without: Tensor, predictions: Tensor, w: Tensor, eta: float
) -> Tensor:
    """`compute_cross_entropy` of labels ``y``, ``without`` being 1 less them, and weights in float64."""
    p = predictions.double().clamp(min=eta, max=1.0 - eta)
    return -w * (y * torch.log2(p) + without * torch.log2(1.0 - p))


def get_ne_states(
    labels: Tensor, predictions: Tensor, weights: Tensor, eta: float
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    w, y = weights.double(), labels.double()
    without = 1.0 - y
    return sums_together({
        "cross_entropy_sum": _cross_entropy(y, without, predictions, w, eta),
        "weighted_num_samples": w,
        "pos_labels": w * y,
        "neg_labels": w * without,
    })  # fmt: skip


def compute_ne(  # noqa: PLR0917 - the signature TorchRec users know
    ce_sum: Tensor,
    weighted_num_samples: Tensor,
    pos_labels: Tensor,
    neg_labels: Tensor,
    eta: float,
    allow_missing_label_with_zero_weight: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """The NE of sums ``[T]``.

    The mean label is moved into ``[eta, 1 - eta]``, so examples of one class give a finite value without
    meaning, as large as 1e11.  Without weights it is NaN, or ``eta`` where
    ``allow_missing_label_with_zero_weight`` says so.
    """
    none = weighted_num_samples == 0
    mean = pos_labels.double() / weighted_num_samples.double().clamp(min=eta)
    mean = mean.clamp(min=eta, max=1.0 - eta)
    of_mean = -pos_labels * torch.log2(mean) - neg_labels * torch.log2(1.0 - mean)
    ne = ce_sum / of_mean
    return torch.where(none, eta, ne) if allow_missing_label_with_zero_weight else ne


def compute_logloss(ce_sum: Tensor, pos_labels: Tensor, neg_labels: Tensor, eta: float) -> Tensor:
    """The mean cross entropy of an example, in bits."""
    return ce_sum / (pos_labels + neg_labels).clamp(min=eta)


class NEMetricComputation(SumsComputation):
    """The sums of `NEMetric`.

    Args:
        include_logloss: whether the mean cross entropy, in bits, is reported, too.
        allow_missing_label_with_zero_weight: whether a task without weights reports 1e-12 and not NaN.
    """

    _sums = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def __init__(
        self,
        *args: Any,
        include_logloss: bool = False,
        allow_missing_label_with_zero_weight: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._include_logloss = include_logloss
        self._allow_missing = allow_missing_label_with_zero_weight
        self.eta = ETA

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_ne_states(labels, predictions, weights, self.eta)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        entropy, samples, positives, negatives = (sums[name] for name in self._sums)
        ne = compute_ne(entropy, samples, positives, negatives, self.eta, self._allow_missing)
        values: list[tuple[MetricNameBase, Tensor]] = [(MetricName.NE, ne)]
        if self._include_logloss:
            loss = compute_logloss(entropy, positives, negatives, self.eta)
            values.append((MetricName.LOG_LOSS, loss))
        return values


class NEMetric(RecMetric):
    """Normalised entropy."""

    _namespace = MetricNamespace.NE
    _computation_class = NEMetricComputation
