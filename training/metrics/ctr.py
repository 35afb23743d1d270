"""Click-through rate: the mean label.

Shapes: predictions, labels and weights ``[T, B]``; sums ``[T]``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio


def compute_ctr(ctr_num: Tensor, ctr_denom: Tensor) -> Tensor:
    """The mean label of sums ``[T]``; 0 without weights."""
    return ratio(ctr_num, ctr_denom)


def get_ctr_states(
    labels: Tensor,
    predictions: Tensor,  # noqa: ARG001 - the signature TorchRec users know
    weights: Tensor,
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    w = weights.double()
    return {"ctr_num": (w * labels).sum(-1), "ctr_denom": w.sum(-1)}


class CTRMetricComputation(SumsComputation):
    """The sums of `CTRMetric`."""

    _sums = ("ctr_num", "ctr_denom")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_ctr_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        clicks, all_examples = (sums[name] for name in self._sums)
        return [(MetricName.CTR, compute_ctr(clicks, all_examples))]


class CTRMetric(RecMetric):
    """The mean label."""

    _namespace = MetricNamespace.CTR
    _computation_class = CTRMetricComputation
