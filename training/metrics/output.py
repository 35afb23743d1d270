"""Two numbers that a model says itself, as they were in the newest batch: ``latest_imp`` and ``total_latest_imp``.

Shapes: ``required_inputs`` of those names, the mean of each task's ``[B]`` counts; states ``[T]``, added over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
)
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS

NAMES = ("latest_imp", "total_latest_imp")


class OutputMetricComputation(RecMetricComputation):
    """The states of `OutputMetric`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in NAMES:
            self._add_state(
                name,
                torch.zeros(self._n_tasks, dtype=torch.double),
                add_window_state=False,
                dist_reduce_fx="sum",
                persistent=False,
            )

    def update(
        self,
        *,
        predictions: Tensor | None,  # noqa: ARG002 - the numbers are in the required inputs
        labels: Tensor,  # noqa: ARG002
        weights: Tensor | None,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Take both numbers of a batch.

        Raises:
            RecMetricException: one is missing.
        """
        inputs = kwargs.get(REQUIRED_INPUTS, {})
        missing = [name for name in NAMES if name not in inputs]
        if missing:
            raise RecMetricException(
                f"required_inputs has no {missing[0]!r}; give the model's tensor"
            )
        for name in NAMES:
            self.get_buffer(name).copy_(inputs[name].double().mean(-1))

    def _compute(self) -> list[MetricComputationReport]:
        return [
            MetricComputationReport(
                MetricName.OUTPUT, MetricPrefix.DEFAULT, self.get_buffer(name).clone(), f"_{name}"
            )
            for name in NAMES
        ]


class OutputMetric(RecMetric):
    """Two numbers of the newest batch."""

    _namespace = MetricNamespace.OUTPUT
    _computation_class = OutputMetricComputation

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._required_inputs.update(NAMES)
