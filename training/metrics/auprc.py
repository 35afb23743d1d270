"""The area under the precision-recall curve (AUPRC) of a window, of all examples or as a mean over groups.

It is summed in steps, not trapezoids, as scikit-learn's average precision is.

Shapes: ``T`` tasks, ``N`` examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.auc import blocks_of_tasks, mean_over_groups
from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.ranked import average_precisions
from tessera.training.metrics.rec_metric import MetricComputationReport, RecMetric
from tessera.training.metrics.rows import GROUPING_KEYS, RowsComputation


def compute_auprc(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Tensor,
    labels: Tensor,
    weights: Tensor,
) -> Tensor:
    """The AUPRC ``[T]`` of predictions, labels in [0, 1] and weights ``[T, N]``; 0 without positive labels."""
    return torch.cat(
        [average_precisions(blocks) for blocks in blocks_of_tasks(predictions, labels, weights)]
    )


def compute_auprc_per_group(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Tensor,
    labels: Tensor,
    weights: Tensor,
    grouping_keys: Tensor,
) -> Tensor:
    """The mean ``[T]`` over groups ``[N]`` of the AUPRC inside each; 0.5 without examples."""
    return torch.stack(
        [
            mean_over_groups(average_precisions(blocks), 0.5)
            for blocks in blocks_of_tasks(predictions, labels, weights, grouping_keys)
        ]
    )


class AUPRCMetricComputation(RowsComputation):
    """The window of `AUPRCMetric`.

    Args:
        grouped_auprc: whether the mean over groups is reported, too.
    """

    def __init__(self, *args: Any, grouped_auprc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_auprc, **kwargs)

    def _compute(self) -> list[MetricComputationReport]:
        rows = self._window()
        values = {MetricName.AUPRC: compute_auprc(self._n_tasks, *rows)}
        if self._grouped:
            values[MetricName.GROUPED_AUPRC] = compute_auprc_per_group(
                self._n_tasks, *rows, grouping_keys=self._groups()
            )
        return [
            MetricComputationReport(name=name, metric_prefix=MetricPrefix.WINDOW, value=value)
            for name, value in values.items()
        ]


class AUPRCMetric(RecMetric):
    """The area under the precision-recall curve of a window."""

    _namespace = MetricNamespace.AUPRC
    _computation_class = AUPRCMetricComputation

    def __init__(self, *args: Any, grouped_auprc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped_auprc=grouped_auprc, **kwargs)
        if grouped_auprc:
            self._required_inputs.add(GROUPING_KEYS)
