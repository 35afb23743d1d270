"""The precision of each label where an example has several labels, which are the bits of an integer.

Bit ``i`` of a prediction says whether label ``i`` is predicted, bit ``i`` of the label whether it is there.

Shapes: predictions, labels (integers) and weights ``[T, B]``; sums ``[T]``.
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


def compute_multi_label_precision(
    num_true_positives: Tensor, num_false_positives: Tensor
) -> Tensor:
    """The precision of sums ``[T]``; 0 where nothing is predicted."""
    predicted = num_true_positives + num_false_positives
    return ratio(num_true_positives, predicted).to(predicted.dtype)


class MultiLabelPrecisionMetricComputation(SumsComputation):
    """The sums of `MultiLabelPrecisionMetric`.

    Args:
        num_labels: how many bits are labels.
        label_names: a name of each for its keys; None: ``label_0``, ``label_1``, ....

    Raises:
        ValueError: the names are not as many.
    """

    def __init__(
        self,
        *args: Any,
        num_labels: int = 1,
        label_names: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        names = [f"label_{i}" for i in range(num_labels)] if label_names is None else label_names
        if len(names) != num_labels:
            raise ValueError(
                f"label_names has {len(names)} names of {num_labels} labels; give one of each"
            )
        self._names = names
        self._sums = tuple(f"{kind}_pos_sum_{name}" for name in names for kind in ("true", "false"))
        super().__init__(*args, **kwargs)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        predicted, seen = predictions.to(torch.int64), labels.to(torch.int64)
        sums = {}
        for bit, name in enumerate(self._names):
            chosen = weights.double() * (predicted >> bit & 1)
            sums[f"true_pos_sum_{name}"] = (chosen * (seen >> bit & 1)).sum(-1)
            sums[f"false_pos_sum_{name}"] = (chosen * (1 - (seen >> bit & 1))).sum(-1)
        return sums

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(name, value) for name, _, value in self._described(sums)]

    def _described(self, sums: Sums) -> list[tuple[MetricNameBase, str | None, Tensor]]:
        return [
            (
                MetricName.MULTI_LABEL_PRECISION,
                name,
                compute_multi_label_precision(
                    sums[f"true_pos_sum_{name}"], sums[f"false_pos_sum_{name}"]
                ),
            )
            for name in self._names
        ]


class MultiLabelPrecisionMetric(RecMetric):
    """The precision of each label."""

    _namespace = MetricNamespace.MULTI_LABEL_PRECISION
    _computation_class = MultiLabelPrecisionMetricComputation
