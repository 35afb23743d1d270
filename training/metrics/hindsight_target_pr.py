"""The lowest of 1,000 thresholds at which precision reaches a target, and precision and recall there.

It says, in hindsight, what the best threshold would have been.

Shapes: predictions (probabilities), labels in [0, 1] and weights ``[T, B]``; sums ``[T, 1000]``.
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

THRESHOLD_GRANULARITY = 1000


def compute_precision(num_true_positives: Tensor, num_false_positives: Tensor) -> Tensor:
    """The precision of sums; 0 where nothing is predicted to be positive."""
    return ratio(num_true_positives, num_true_positives + num_false_positives)


def compute_recall(num_true_positives: Tensor, num_false_negitives: Tensor) -> Tensor:
    """The recall of sums; 0 without positive labels."""
    return ratio(num_true_positives, num_true_positives + num_false_negitives)


def compute_threshold_idx(
    num_true_positives: Tensor, num_false_positives: Tensor, target_precision: float
) -> int:
    """The first of ``[1000]`` thresholds whose precision reaches the target, or the last one."""
    reached = compute_precision(num_true_positives, num_false_positives) >= target_precision
    return int(reached.int().argmax()) if bool(reached.any()) else len(reached) - 1


def _thresholds(like: Tensor) -> Tensor:
    return torch.linspace(0, 1, THRESHOLD_GRANULARITY, device=like.device).double()


def _by_threshold(predictions: Tensor, values: Tensor, *, above: bool) -> Tensor:
    """The sum of ``values`` whose prediction is at or above (or: at or below) each threshold, ``[..., 1000]``."""
    first = torch.searchsorted(_thresholds(predictions), predictions.double(), right=above)
    # first: how many thresholds are at or below the prediction (or: the first one at or above it).
    by_place = values.new_zeros(*values.shape[:-1], THRESHOLD_GRANULARITY + 1, dtype=torch.double)
    by_place.scatter_add_(-1, first, values.double())
    if above:
        return by_place.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    return by_place.cumsum(-1)[..., :-1]


def compute_true_pos_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weight of positive examples at or above each threshold; ``[..., B]`` to ``[..., 1000]``."""
    return _by_threshold(predictions, weights * labels, above=True)


def compute_false_pos_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weight of negative examples at or above each threshold; ``[..., B]`` to ``[..., 1000]``."""
    return _by_threshold(predictions, weights * (1 - labels), above=True)


def compute_false_neg_sum(labels: Tensor, predictions: Tensor, weights: Tensor) -> Tensor:
    """The weight of positive examples at or below each threshold; ``[..., B]`` to ``[..., 1000]``.

    A prediction that is a threshold counts on both sides, as TorchRec has it.
    """
    return _by_threshold(predictions, weights * labels, above=False)


def get_pr_states(labels: Tensor, predictions: Tensor, weights: Tensor | None) -> dict[str, Tensor]:
    """What a batch adds to the sums; ``weights`` None: 1."""
    weights = torch.ones_like(predictions) if weights is None else weights
    return {
        "true_pos_sum": compute_true_pos_sum(labels, predictions, weights),
        "false_pos_sum": compute_false_pos_sum(labels, predictions, weights),
        "false_neg_sum": compute_false_neg_sum(labels, predictions, weights),
    }


class HindsightTargetPRMetricComputation(SumsComputation):
    """The sums of `HindsightTargetPRMetric`.

    Args:
        target_precision: what the precision has to reach.
    """

    _sums = ("true_pos_sum", "false_pos_sum", "false_neg_sum")

    def __init__(self, *args: Any, target_precision: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._target_precision = target_precision

    def _width(self, name: str, /) -> tuple[int, ...]:  # noqa: ARG002
        return (THRESHOLD_GRANULARITY,)

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_pr_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        found, wrong, missed = (sums[name] for name in self._sums)
        places = torch.tensor(
            [
                compute_threshold_idx(*of_task, self._target_precision)
                for of_task in zip(found, wrong, strict=True)
            ],
            device=found.device,
        )
        at = [each.gather(1, places[:, None])[:, 0] for each in (found, wrong, missed)]
        return [
            (MetricName.HINDSIGHT_TARGET_PR, places.double()),
            (MetricName.HINDSIGHT_TARGET_PRECISION, compute_precision(at[0], at[1])),
            (MetricName.HINDSIGHT_TARGET_RECALL, compute_recall(at[0], at[2])),
        ]


class HindsightTargetPRMetric(RecMetric):
    """The number of the threshold that reaches a precision, 0 to 999, and precision and recall there."""

    _namespace = MetricNamespace.HINDSIGHT_TARGET_PR
    _computation_class = HindsightTargetPRMetricComputation
