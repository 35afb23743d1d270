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
from tessera.training.metrics.ranked_rows import as_rows, row_areas
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import Sums, SumsComputation

_MOST_CELLS = 4
"""Sessions are ranked as rows of a matrix that has at most so many cells for each example."""


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
    tasks, sessions = len(labels), len(num_candidates)
    sizes = num_candidates.to(labels.device, torch.int64)
    # One wait for both, and none for the sessions' numbers.
    total, longest = torch.stack([sizes.sum(), sizes.max()]).tolist() if sessions else (0, 0)
    if total != labels.shape[-1]:
        raise RecMetricException(
            f"num_candidates has {total} examples and the batch {labels.shape[-1]}; give the "
            "number of examples of each session"
        )
    # The sessions of all tasks are ranked at once.
    sizes, count = (sizes.repeat(tasks) if tasks > 1 else sizes), sessions * tasks
    examples = [given.flatten() for given in (predictions, labels, weights)]
    if 0 < longest * count <= _MOST_CELLS * total * tasks:
        areas, ranks = _of_rows(examples, sizes, longest)
    else:
        groups = torch.repeat_interleave(sizes, output_size=total * tasks)
        scores, y, w = examples
        blocks = ranked_blocks(scores, y, w, groups, count)
        ranks = (blocks.positives > 0) & (blocks.negatives > 0) & (blocks.scores > 1)
        areas = areas_under_roc(blocks)
    areas = torch.where(ranks, areas, 0.0)
    return {
        "auc_sum": areas.view(tasks, sessions).sum(1),
        "num_samples": ranks.view(tasks, sessions).sum(1),
    }


def _of_rows(examples: list[Tensor], sizes: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The AUC of each session and whether it ranks anything, ``[G]``, with sessions as rows of matrices.

    Args:
        examples: predictions, labels and weights ``[N]``.
        sizes: int64 ``[G]``, the examples of each session.
        longest: the greatest of them.
    """
    total, count = len(examples[0]), len(sizes)
    full = longest * count == total
    if full:
        scores, y, w = (given.view(count, longest) for given in examples)
    else:
        groups = torch.repeat_interleave(sizes, output_size=total)
        firsts = torch.arange(count, device=sizes.device) * longest - (sizes.cumsum(0) - sizes)
        cells = torch.arange(total, device=sizes.device) + firsts.index_select(0, groups)
        if not examples[0].is_floating_point():
            examples = [examples[0].double(), *examples[1:]]
        fillings = (-torch.inf, 0.0, 0.0)
        scores, y, w = (
            as_rows(given, cells, count, longest, filling)
            for given, filling in zip(examples, fillings, strict=True)
        )
    rows = row_areas(scores, y, w)
    if full:
        blocks = rows.blocks[:, -1]
    else:
        blocks = rows.blocks.gather(1, (sizes - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return rows.aucs(), (rows.positives > 0) & (rows.negatives > 0) & (blocks > 1)


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
