"""The area under the ROC curve (AUC) of a window, of all examples or as a mean over groups.

It is computed from the window's examples, so there is no value since the training began.

Shapes: ``T`` tasks, ``N`` examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.ranked import (
    RankedBlocks,
    area_under_roc,
    areas_under_roc,
    ranked_blocks,
)
from tessera.training.metrics.ranked_rows import row_areas
from tessera.training.metrics.rec_metric import MetricComputationReport, RecMetric
from tessera.training.metrics.rows import GROUPING_KEYS, RowsComputation, in_one

_POSITIVE_FROM = 0.039


def blocks_of_tasks(
    predictions: Tensor, labels: Tensor, weights: Tensor, grouping_keys: Tensor | None = None
) -> list[RankedBlocks]:
    """Each task's examples ``[T, N]`` ranked in groups ``[N]``, or in one group."""
    if grouping_keys is None:
        count = 1
        groups = torch.zeros(predictions.shape[-1], dtype=torch.int64, device=predictions.device)
    else:
        names, groups = torch.unique(grouping_keys, return_inverse=True)
        count = len(names)
    return [
        ranked_blocks(*of_task, groups, count)
        for of_task in zip(predictions, labels, weights, strict=True)
    ]


def compute_auc(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Sequence[Tensor],
    labels: Sequence[Tensor],
    weights: Sequence[Tensor],
    apply_bin: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """The AUC ``[T]`` of examples, parts ``[T, n]`` of each; ties count one half; 0.5 for one class.

    Args:
        n_tasks: ``T``.
        predictions: anything that ranks examples.
        labels: in [0, 1]; one between them is partly positive.
        weights: how many examples one stands for.
        apply_bin: whether labels from 0.039 up are 1.
    """
    scores, y, w = (in_one(parts) for parts in (predictions, labels, weights))
    if apply_bin:
        y = torch.where(y >= _POSITIVE_FROM, torch.ones_like(y), y)
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:1], 0.5, dtype=torch.float64)
    if scores.device.type == "cpu":
        return torch.stack([area_under_roc(*of_task) for of_task in zip(scores, y, w, strict=True)])
    return torch.stack([row_areas(*of_task).aucs() for of_task in zip(scores, y, w, strict=True)])


def compute_auc_per_group(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Sequence[Tensor],
    labels: Sequence[Tensor],
    weights: Sequence[Tensor],
    grouping_keys: Tensor,
) -> Tensor:
    """The mean ``[T]`` over groups of the AUC inside each, 0.5 for one class and without examples.

    Args:
        n_tasks: ``T``.
        predictions: parts ``[T, n]``.
        labels: parts ``[T, n]``.
        weights: parts ``[T, n]``.
        grouping_keys: integers ``[N]``, equal where examples belong together.
    """
    scores, y, w = (in_one(parts) for parts in (predictions, labels, weights))
    return torch.stack(
        [
            mean_over_groups(areas_under_roc(blocks), 0.5)
            for blocks in blocks_of_tasks(scores, y, w, grouping_keys)
        ]
    )


def mean_over_groups(values: Tensor, without: float) -> Tensor:
    """The mean of ``[G]`` values, ``without`` if there are none."""
    return values.mean() if len(values) else values.new_full((), without)


class AUCMetricComputation(RowsComputation):
    """The window of `AUCMetric`.

    Args:
        grouped_auc: whether the mean over groups is reported, too.
        apply_bin: whether labels from 0.039 up are 1 in the AUC of all examples.
    """

    def __init__(
        self, *args: Any, grouped_auc: bool = False, apply_bin: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, grouped=grouped_auc, **kwargs)
        self._apply_bin = apply_bin

    def _compute(self) -> list[MetricComputationReport]:
        predictions, labels, weights = ([rows] for rows in self._window())
        auc = compute_auc(self._n_tasks, predictions, labels, weights, self._apply_bin)
        values = {MetricName.AUC: auc}
        if self._grouped:
            values[MetricName.GROUPED_AUC] = compute_auc_per_group(
                self._n_tasks, predictions, labels, weights, self._groups()
            )
        return [
            MetricComputationReport(name=name, metric_prefix=MetricPrefix.WINDOW, value=value)
            for name, value in values.items()
        ]


class AUCMetric(RecMetric):
    """The area under the ROC curve of a window."""

    _namespace = MetricNamespace.AUC
    _computation_class = AUCMetricComputation

    def __init__(self, *args: Any, grouped_auc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped_auc=grouped_auc, **kwargs)
        if grouped_auc:
            self._required_inputs.add(GROUPING_KEYS)
