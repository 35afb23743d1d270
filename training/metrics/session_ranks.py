"""The best predictions of each session, which the session metrics take for positive.

A task's `SessionMetricDef` names the tensor with the sessions, how many of the best count, and whether the best labels
take the labels' place.  Sessions inside a batch count, whatever their order; equal predictions share the better place
of those below them, as TorchRec has it.

Shapes: one task, so ``T`` is 1: predictions, labels, weights and sessions ``[1, B]``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_config import RecTaskInfo, SessionMetricDef
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import SumsComputation
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS


def ranking_within_session(predictions: Tensor, session: Tensor) -> Tensor:
    """How many predictions of the session are above each one, ``[B]`` int64, from ``[1, B]`` or ``[B]``.

    Memory: one byte for each pair of examples.
    """
    scores, sessions = predictions.reshape(-1), session.reshape(-1)
    same = sessions[:, None] == sessions[None, :]
    return (same & (scores[None, :] > scores[:, None])).sum(-1)


class SessionSumsComputation(SumsComputation):
    """Sums over the best predictions of sessions.

    Args:
        session_metric_def: what is a session and how many count.
    """

    def __init__(self, *args: Any, session_metric_def: SessionMetricDef, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.top_threshold = session_metric_def.top_threshold
        self.run_ranking_of_labels = session_metric_def.run_ranking_of_labels
        self.session_var_name = session_metric_def.session_var_name

    def _chosen(
        self, predictions: Tensor, labels: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Which predictions are positive, and the labels, both ``[1, B]`` float64.

        Raises:
            RecMetricException: the sessions are missing.
        """
        session = inputs.get(REQUIRED_INPUTS, {}).get(self.session_var_name)
        if session is None:
            raise RecMetricException(
                f"required_inputs has no {self.session_var_name!r}; give the session of each example"
            )
        assert self.top_threshold is not None, "the metric asks each task for one"
        best = ranking_within_session(predictions, session) < self.top_threshold
        if self.run_ranking_of_labels:
            labels = (ranking_within_session(labels, session) < self.top_threshold).view_as(labels)
        return best.view_as(predictions).double(), labels.double()


class SessionMetric(RecMetric):
    """The base class of metrics of sessions.

    Raises:
        RecMetricException: tasks or batches that are fused, or a task without a ``top_threshold``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._fused or self._fused_update_limit > 0:
            raise RecMetricException(
                "metrics of sessions take one task and one batch at a time; give "
                "UNFUSED_TASKS_COMPUTATION and fused_update_limit=0"
            )
        self._required_inputs.update(
            task.session_metric_def.session_var_name
            for task in self._tasks
            if task.session_metric_def is not None
        )

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        task = task_config[0] if isinstance(task_config, list) else task_config
        chosen = task.session_metric_def
        if chosen is None or chosen.top_threshold is None:
            raise RecMetricException(
                f"task {task.name!r} has no session_metric_def with a top_threshold; give one"
            )
        return {"session_metric_def": chosen}
