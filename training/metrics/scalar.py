"""Any number that a program gives as labels: the newest one, and the mean of a window of updates.

Shapes: labels ``[T, B]``, of which an update counts the mean; states ``[T]``.
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


class ScalarMetricComputation(RecMetricComputation):
    """The states of `ScalarMetric`; the window holds ``window_size`` updates."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("labels", "window_count"):
            self._add_state(
                name,
                torch.zeros(self._n_tasks, dtype=torch.double),
                add_window_state=True,
                dist_reduce_fx="mean",
                persistent=False,
            )

    def update(
        self,
        *,
        predictions: Tensor | None,  # noqa: ARG002 - the number is in the labels
        labels: Tensor,
        weights: Tensor | None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take the mean of the labels ``[T, B]``."""
        mean = labels.double().mean(-1)
        for name, value in (("labels", mean), ("window_count", torch.ones_like(mean))):
            self.get_buffer(name).copy_(value)
            self._aggregate_window_state(name, value, 1)

    def _compute(self) -> list[MetricComputationReport]:
        window = self.get_window_state("labels") / self.get_window_state("window_count")
        newest = self.get_buffer("labels").clone()
        return [
            MetricComputationReport(MetricName.SCALAR, MetricPrefix.LIFETIME, newest),
            MetricComputationReport(MetricName.SCALAR, MetricPrefix.WINDOW, window),
        ]


class ScalarMetric(RecMetric):
    """The newest number, and the mean of a window's."""

    _namespace = MetricNamespace.SCALAR
    _computation_class = ScalarMetricComputation
