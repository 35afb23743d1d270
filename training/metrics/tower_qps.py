"""Examples of a task per second, over all ranks: the sum of their examples over the longest time of a rank.

For models whose tasks have different numbers of examples.  `ThroughputMetric` is that of a whole training.

Shapes: labels ``[T, B]``; states ``[T]``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from tessera.training.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecModelOutput,
)
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import ratio

WARMUP_STEPS = 100
NUM_EXAMPLES = "num_examples"
WARMUP_EXAMPLES = "warmup_examples"
TIME_LAPSE = "time_lapse"


class TowerQPSMetricComputation(RecMetricComputation):
    """The states of `TowerQPSMetric`.

    Args:
        warmup_steps: batches at the beginning that are not timed.
    """

    def __init__(self, *args: Any, warmup_steps: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._warmup_steps = warmup_steps
        self._steps = 0
        self._previous_s = 0.0
        for name, dtype, reduction in (
            (NUM_EXAMPLES, torch.int64, "sum"),
            (WARMUP_EXAMPLES, torch.int64, "sum"),
            (TIME_LAPSE, torch.double, "max"),
        ):
            self._add_state(
                name,
                torch.zeros(self._n_tasks, dtype=dtype),
                add_window_state=name != WARMUP_EXAMPLES,
                dist_reduce_fx=reduction,
                persistent=True,
            )

    def update(
        self,
        *,
        predictions: Tensor | None,  # noqa: ARG002 - examples are counted
        labels: Tensor,
        weights: Tensor | None,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Count and time a batch of labels ``[T, B]``."""
        self._steps += 1
        count, now_s = labels.shape[-1], time.monotonic()
        total = self.get_buffer(NUM_EXAMPLES)
        total += count
        if self._steps <= self._warmup_steps:
            warmup = self.get_buffer(WARMUP_EXAMPLES)
            warmup += count
        else:
            lapse = self.get_buffer(TIME_LAPSE)
            took = torch.full_like(lapse, now_s - self._previous_s)
            lapse += took
            self._aggregate_window_state(NUM_EXAMPLES, torch.full_like(total, count), count)
            self._aggregate_window_state(TIME_LAPSE, took, count)
        self._previous_s = now_s

    def _compute(self) -> list[MetricComputationReport]:
        total = self.get_buffer(NUM_EXAMPLES).clone()
        timed = total - self.get_buffer(WARMUP_EXAMPLES)
        lifetime = ratio(timed, self.get_buffer(TIME_LAPSE))
        window = ratio(self.get_window_state(NUM_EXAMPLES), self.get_window_state(TIME_LAPSE))
        return [
            MetricComputationReport(MetricName.TOWER_QPS, MetricPrefix.LIFETIME, lifetime),
            MetricComputationReport(MetricName.TOWER_QPS, MetricPrefix.WINDOW, window),
            MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, total),
        ]


class TowerQPSMetric(RecMetric):
    """Examples of a task per second.

    Args:
        warmup_steps: batches at the beginning that are not timed.

    Raises:
        RecMetricException: a ``fused_update_limit``, with which batches are not counted when they come.
    """

    _namespace = MetricNamespace.TOWER_QPS
    _computation_class = TowerQPSMetricComputation

    def __init__(self, *args: Any, warmup_steps: int = WARMUP_STEPS, **kwargs: Any) -> None:
        super().__init__(*args, warmup_steps=warmup_steps, **kwargs)
        if self._fused_update_limit > 0:
            raise RecMetricException(
                "a throughput times each batch when it comes; give fused_update_limit=0"
            )

    def update(
        self,
        *,
        predictions: RecModelOutput | None,  # noqa: ARG002 - examples are counted
        labels: RecModelOutput,
        weights: RecModelOutput | None,
        **kwargs: Any,
    ) -> None:
        """Count a batch by its labels; see `RecMetric.update`."""
        super().update(predictions=labels, labels=labels, weights=weights, **kwargs)
