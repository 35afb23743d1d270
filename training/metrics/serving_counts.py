"""How many examples had a weight: what the metrics of served examples report beside their value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.training.metrics.metrics_namespace import MetricName, MetricPrefix
from tessera.training.metrics.rec_metric import MetricComputationReport
from tessera.training.metrics.sums import SumsComputation, given

NUM_EXAMPLES = "num_examples"


class WeightedExamplesMixin(SumsComputation):
    """Counts the examples whose weight is not 0, since the training began; comes before the metric's class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add_state(
            NUM_EXAMPLES,
            torch.zeros(self._n_tasks, dtype=torch.int64),
            add_window_state=False,
            dist_reduce_fx="sum",
            persistent=True,
        )

    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Count a batch: predictions, labels and weights ``[T, B]``."""
        super().update(predictions=predictions, labels=labels, weights=weights, **kwargs)
        count = self.get_buffer(NUM_EXAMPLES)
        count += torch.count_nonzero(given("weights", weights), dim=-1)

    def _compute(self) -> list[MetricComputationReport]:
        count = self.get_buffer(NUM_EXAMPLES).clone()
        total = MetricComputationReport(MetricName.TOTAL_EXAMPLES, MetricPrefix.DEFAULT, count)
        return [*super()._compute(), total]
