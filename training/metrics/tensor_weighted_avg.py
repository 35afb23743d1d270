"""The mean of any tensor of the model's output, weighted or not as the task says.

A task's ``tensor_name`` is the tensor's key in ``required_inputs`` and its ``weighted`` says whether weights count.

Shapes: tensors and weights ``[T, B]``; sums ``[T]``.
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
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import Sums, SumsComputation
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS
from tessera.training.metrics.weighted_avg import get_mean

__all__ = ["TensorWeightedAvgMetric", "TensorWeightedAvgMetricComputation", "get_mean"]


class TensorWeightedAvgMetricComputation(SumsComputation):
    """The sums of `TensorWeightedAvgMetric`.

    Args:
        tasks: whose tensors it takes.
        description: added to the keys.

    Raises:
        RecMetricException: a task has no ``tensor_name``.
    """

    _sums = ("weighted_sum", "weighted_num_samples")

    def __init__(
        self, *args: Any, tasks: list[RecTaskInfo], description: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for task in tasks:
            if task.tensor_name is None:
                raise RecMetricException(
                    f"task {task.name!r} has no tensor_name; give the tensor's key"
                )
        self.tasks = tasks
        self._description = description

    def _of_batch(
        self,
        predictions: Tensor,  # noqa: ARG002 - the tensor is in the required inputs
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,
    ) -> Sums:
        inputs = kwargs.get(REQUIRED_INPUTS, {})
        rows, factors = [], []
        for place, task in enumerate(self.tasks):
            if task.tensor_name not in inputs:
                raise RecMetricException(
                    f"required_inputs has no {task.tensor_name!r}, which task {task.name!r} needs; give it"
                )
            rows.append(inputs[task.tensor_name].expand(labels.shape)[place].double())
            own = weights[place].double()
            factors.append(own if task.weighted else torch.ones_like(own))
        values, w = torch.stack(rows), torch.stack(factors)
        return {"weighted_sum": (values * w).sum(-1), "weighted_num_samples": w.sum(-1)}

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        values, samples = (sums[name] for name in self._sums)
        return [(MetricName.WEIGHTED_AVG, get_mean(values, samples))]

    def _described(self, sums: Sums) -> list[tuple[MetricNameBase, str | None, Tensor]]:
        return [(name, self._description, value) for name, value in self._of_sums(sums)]


class TensorWeightedAvgMetric(RecMetric):
    """The mean of any tensor of the model's output.

    Raises:
        RecMetricException: tasks want one tensor weighted and not weighted.
    """

    _namespace = MetricNamespace.WEIGHTED_AVG
    _computation_class = TensorWeightedAvgMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weighted: dict[str, bool] = {}
        for task in self._tasks:
            name = str(task.tensor_name)
            if weighted.setdefault(name, task.weighted) is not task.weighted:
                raise RecMetricException(
                    f"tasks want the tensor {name!r} weighted and not weighted; give it two names"
                )
        self._required_inputs.update(weighted)

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        return {"tasks": task_config if isinstance(task_config, list) else [task_config]}
