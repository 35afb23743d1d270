"""Normalised discounted cumulative gain (NDCG) of sessions; reported as 1 - NDCG unless asked otherwise.

So that it falls while a model learns, as losses do.  A session counts with its largest weight.  Examples of
a session with equal predictions share the mean discount of their places, as in scikit-learn's ``ndcg_score``.

Shapes: ``T`` tasks, ``B`` examples of a batch, ``S`` sessions in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_config import RecTaskInfo
from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.ranked import Discounts, discounted_gains, discounts_of
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import Sums, SumsComputation
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS

SESSION_KEY = "session_id"
_NO_GAIN = 1e-6


class NDCGComputation(SumsComputation):
    """The sums of `NDCGMetric`; its `update` takes ``required_inputs[session_key]``, integers ``[B]``.

    Args:
        exponential_gain: whether a label counts ``2 ** label - 1``, or itself.
        session_key: the name of the sessions.
        k: places of a session that count; -1: all.
        report_ndcg_as_decreasing_curve: whether 1 - NDCG is reported.
        remove_single_length_sessions: whether sessions of one example are left out.
        scale_by_weights_tensor: whether weights multiply labels and predictions, and not the session's value.
        is_negative_task_mask: for each task, whether one minus its labels and predictions are taken.
    """

    _sums = ("sum_ndcg", "num_sessions")

    def __init__(
        self,
        *args: Any,
        exponential_gain: bool = False,
        session_key: str = SESSION_KEY,
        k: int = -1,
        report_ndcg_as_decreasing_curve: bool = True,
        remove_single_length_sessions: bool = False,
        scale_by_weights_tensor: bool = False,
        is_negative_task_mask: list[bool] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if k != -1 and k < 1:
            raise RecMetricException(f"k={k}; give at least 1, or -1 for all places")
        self._exponential_gain = exponential_gain
        self._session_key = session_key
        self._k = None if k == -1 else k
        self._decreasing = report_ndcg_as_decreasing_curve
        self._remove_single = remove_single_length_sessions
        self._scale_by_weights = scale_by_weights_tensor
        self._negative = is_negative_task_mask or [False] * self._n_tasks

    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        ids = kwargs.get(REQUIRED_INPUTS, {}).get(self._session_key)
        if ids is None or ids.numel() not in {labels.numel(), labels.shape[-1]}:
            raise RecMetricException(
                f"required_inputs[{self._session_key!r}] is missing; give the session of each example"
            )
        ids = ids.reshape(-1, labels.shape[-1])
        if len(ids) > 1 and not bool((ids == ids[0]).all()):
            raise RecMetricException("the tasks have other sessions; NDCG needs the same for all")
        _, sessions, sizes = torch.unique(ids[0], return_inverse=True, return_counts=True)
        rows = torch.stack([predictions.double(), labels.double(), weights.double()])
        if self._remove_single:
            kept = (sizes > 1)[sessions]
            rows = rows[..., kept]
            _, sessions, sizes = torch.unique(
                sessions[kept], return_inverse=True, return_counts=True
            )
        discounts = discounts_of(sizes, len(sessions), self._k)
        values = [
            self._of_task(p, y, w, sessions, discounts, negative=negative)
            for p, y, w, negative in zip(*rows, self._negative, strict=True)
        ]
        return {
            "sum_ndcg": torch.stack(values),
            "num_sessions": rows.new_full((len(values),), len(sizes)),
        }

    def _of_task(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        sessions: Tensor,
        discounts: Discounts,
        *,
        negative: bool,
    ) -> Tensor:
        """The sum over sessions of what each reports, a scalar."""
        if negative:
            predictions, labels = 1.0 - predictions, 1.0 - labels
        if self._scale_by_weights:
            predictions, labels = weights * predictions, weights * labels
        gains = torch.exp2(labels) - 1.0 if self._exponential_gain else labels
        gained = discounted_gains(predictions, gains, sessions, discounts)
        best = discounted_gains(labels, gains, sessions, discounts)
        ndcg = gained / torch.where(best == 0, _NO_GAIN, best)
        value = 1.0 - ndcg if self._decreasing else ndcg
        if not self._scale_by_weights:
            largest = weights.new_zeros(discounts.groups)
            largest = largest.scatter_reduce(0, sessions, weights, "amax")
            value = value * largest
        return value.sum()

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        return [(MetricName.NDCG, sums["sum_ndcg"] / sums["num_sessions"])]


class NDCGMetric(RecMetric):
    """Normalised discounted cumulative gain of sessions."""

    _namespace = MetricNamespace.NDCG
    _computation_class = NDCGComputation

    def __init__(self, *args: Any, session_key: str = SESSION_KEY, **kwargs: Any) -> None:
        super().__init__(*args, session_key=session_key, **kwargs)
        self._required_inputs.add(session_key)

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        tasks = task_config if isinstance(task_config, list) else [task_config]
        return {"is_negative_task_mask": [task.is_negative_task for task in tasks]}
