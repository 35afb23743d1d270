"""GAUC: the mean over sessions of the AUC inside each; sessions stand behind one another in a batch.

Sessions of one label or of one score rank nothing and are left out.

Shapes: ``T`` tasks, ``B`` examples of a batch, ``G`` sessions.
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
from tessera.training.metrics.ranked import areas_under_roc, ranked_blocks
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import Sums, SumsComputation


def get_auc_states(
    labels: Tensor, predictions: Tensor, weights: Tensor, num_candidates: Tensor
) -> dict[str, Tensor]:
    """The sum of the sessions' AUCs and their number, each ``[T]``.

    Args:
        labels: ``[T, B]``.
        predictions: ``[T, B]``.
        weights: ``[T, B]``.
        num_candidates: int ``[G]``, the examples of each session; their sum is ``B``.

    Raises:
        RecMetricException: their sum is another.
    """
    count = len(num_candidates)
    groups = torch.repeat_interleave(
        torch.arange(count, device=labels.device), num_candidates.to(labels.device)
    )
    if len(groups) != labels.shape[-1]:
        raise RecMetricException(
            f"num_candidates has {len(groups)} examples and the batch {labels.shape[-1]}; give the "
            "number of examples of each session"
        )
    sums, numbers = [], []
    for of_task in zip(predictions, labels, weights, strict=True):
        blocks = ranked_blocks(*of_task, groups, count)
        ranks = (blocks.positives > 0) & (blocks.negatives > 0) & (blocks.scores > 1)
        sums.append(torch.where(ranks, areas_under_roc(blocks), 0.0).sum())
        numbers.append(ranks.sum())
    return {"auc_sum": torch.stack(sums), "num_samples": torch.stack(numbers)}


def compute_window_auc(auc: Tensor, num_samples: Tensor) -> dict[str, Tensor]:
    """The mean AUC of sums ``[T]``, 0.5 without sessions, and the number of sessions."""
    return {"gauc": (auc + 1e-9) / (num_samples + 2e-9), "num_samples": num_samples}


class GAUCMetricComputation(SumsComputation):
    """The sums of `GAUCMetric`; its `update` takes ``num_candidates``, see `get_auc_states`."""

    _sums = ("auc_sum", "num_samples")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        *,
        num_candidates: Tensor | None = None,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        if num_candidates is None:
            raise RecMetricException("num_candidates is missing; give the examples of each session")
        return get_auc_states(labels, predictions, weights, num_candidates)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        values = compute_window_auc(sums["auc_sum"], sums["num_samples"])
        return [
            (MetricName.GAUC, values["gauc"]),
            (MetricName.GAUC_NUM_SAMPLES, values["num_samples"].clone()),
        ]


class GAUCMetric(RecMetric):
    """The mean over sessions of the AUC inside each."""

    _namespace = MetricNamespace.GAUC
    _computation_class = GAUCMetricComputation
