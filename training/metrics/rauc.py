"""RAUC, the AUC of labels that are numbers: the share of pairs of a window that predictions do not put wrongly.

Examples are sorted by prediction, those that are predicted alike by label; a pair is wrong where the label falls.
Weights do not count.

Shapes: ``T`` tasks, ``N`` examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.auc import mean_over_groups
from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.rec_metric import MetricComputationReport, RecMetric
from tessera.training.metrics.rows import GROUPING_KEYS, RowsComputation


def _inversions(values: Tensor) -> int:
    """How many pairs of ``[N]`` fall, equal ones not counted.

    Values are numbered by size.  Two numbers first differ in some binary digit; for each digit, from the highest
    down, the ones that stand before a zero are counted among the numbers that agree in all higher digits.
    """
    _, numbers = torch.unique(values, return_inverse=True)
    total = 0
    for digit in reversed(range(int(numbers.max()).bit_length() if len(numbers) else 0)):
        higher = numbers >> (digit + 1)
        order = torch.argsort(higher, stable=True)
        ones = (numbers[order] >> digit) & 1
        before = ones.cumsum(0)
        starts = torch.searchsorted(higher[order], higher[order])
        in_front = torch.where(starts > 0, before[(starts - 1).clamp(min=0)], 0)
        total += int(((1 - ones) * (before - in_front)).sum())
    return total


def _share(predictions: Tensor, labels: Tensor) -> Tensor:
    """The share of one task's pairs, a float64 scalar; 0.5 of fewer than two examples, which rank nothing."""
    count = len(labels)
    if count < 2:
        return torch.tensor(0.5, dtype=torch.double, device=labels.device)
    by_label = torch.argsort(labels, stable=True)
    order = by_label[torch.argsort(predictions[by_label], stable=True)]
    wrong = _inversions(labels[order])
    share = 1.0 - wrong / (count * (count - 1) / 2)
    return torch.tensor(share, dtype=torch.double, device=labels.device)


def compute_rauc(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Sequence[Tensor],
    labels: Sequence[Tensor],
    weights: Sequence[Tensor],  # noqa: ARG001
) -> Tensor:
    """The RAUC ``[T]`` of examples, parts ``[T, n]`` of each; 0.5 of fewer than two."""
    scores, y = (torch.cat(list(parts), dim=-1) for parts in (predictions, labels))
    return torch.stack([_share(*of_task) for of_task in zip(scores, y, strict=True)])


def compute_rauc_per_group(
    n_tasks: int,  # noqa: ARG001 - the signature TorchRec users know
    predictions: Sequence[Tensor],
    labels: Sequence[Tensor],
    weights: Sequence[Tensor],  # noqa: ARG001
    grouping_keys: Tensor,
) -> Tensor:
    """The mean ``[T]`` over groups of the RAUC inside each; ``grouping_keys`` are integers ``[N]``."""
    scores, y = (torch.cat(list(parts), dim=-1) for parts in (predictions, labels))
    groups = [grouping_keys == key for key in torch.unique(grouping_keys)]
    means = []
    for own_scores, own_labels in zip(scores, y, strict=True):
        shares = [_share(own_scores[group], own_labels[group]) for group in groups]
        none = own_scores.new_empty(0, dtype=torch.double)
        means.append(mean_over_groups(torch.stack(shares) if shares else none, 0.5))
    return torch.stack(means)


class RAUCMetricComputation(RowsComputation):
    """The window of `RAUCMetric`.

    Args:
        grouped_rauc: whether the mean over groups is reported, too.
    """

    def __init__(self, *args: Any, grouped_rauc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped=grouped_rauc, **kwargs)

    def _compute(self) -> list[MetricComputationReport]:
        predictions, labels, weights = ([rows] for rows in self._window())
        values = {MetricName.RAUC: compute_rauc(self._n_tasks, predictions, labels, weights)}
        if self._grouped:
            values[MetricName.GROUPED_RAUC] = compute_rauc_per_group(
                self._n_tasks, predictions, labels, weights, self._groups()
            )
        return [
            MetricComputationReport(name=name, metric_prefix=MetricPrefix.WINDOW, value=value)
            for name, value in values.items()
        ]


class RAUCMetric(RecMetric):
    """The share of a window's pairs that predictions do not put wrongly."""

    _namespace = MetricNamespace.RAUC
    _computation_class = RAUCMetricComputation

    def __init__(self, *args: Any, grouped_rauc: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, grouped_rauc=grouped_rauc, **kwargs)
        if grouped_rauc:
            self._required_inputs.add(GROUPING_KEYS)
