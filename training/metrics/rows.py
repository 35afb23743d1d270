"""The examples of a window themselves, for metrics that sums do not give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tessera.training.metrics.rec_metric import RecMetricComputation
from tessera.training.metrics.states import RecMetricException
from tessera.training.metrics.sums import given
from tessera.training.metrics.task_inputs import REQUIRED_INPUTS

PREDICTIONS = "predictions"
LABELS = "labels"
WEIGHTS = "weights"
GROUPING_KEYS = "grouping_keys"


def in_one(parts: Sequence[Tensor]) -> Tensor:
    """Parts ``[..., n]`` behind one another; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


class RowsComputation(RecMetricComputation):
    """Holds the newest ``window_size`` examples of a rank: predictions, labels and weights ``[T, N]`` float32.

    Args:
        grouped: whether a group's number is held with each example, int64 ``[N]``, which `update` takes as
            ``required_inputs["grouping_keys"]``.
    """

    def __init__(self, *args: Any, grouped: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grouped = grouped
        self._held = 0
        none = torch.zeros(self._n_tasks, 0)
        for name in (PREDICTIONS, LABELS, WEIGHTS):
            self._add_state(name, [none], add_window_state=False, dist_reduce_fx="cat")
        if grouped:
            none = torch.zeros(0, dtype=torch.int64)
            self._add_state(GROUPING_KEYS, [none], add_window_state=False, dist_reduce_fx="cat")

    def update(
        self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any
    ) -> None:
        """Hold a batch: predictions, labels and weights ``[T, B]``.

        Raises:
            RecMetricException: groups are needed and not given.
        """
        batch = {
            PREDICTIONS: given("predictions", predictions),
            LABELS: labels,
            WEIGHTS: given("weights", weights),
        }
        batch = {name: rows.to(torch.float32, copy=True) for name, rows in batch.items()}
        if self._grouped:
            keys = kwargs.get(REQUIRED_INPUTS, {}).get(GROUPING_KEYS)
            if keys is None or keys.numel() not in {labels.numel(), labels.shape[-1]}:
                raise RecMetricException(
                    f"the metric is one of groups; give required_inputs[{GROUPING_KEYS!r}], the group "
                    "of each example"
                )
            keys = keys.reshape(-1, labels.shape[-1])[0]
            batch[GROUPING_KEYS] = keys.to(torch.int64, copy=True)
        for name, rows in batch.items():
            self._rows(name).append(rows)
        self._held += labels.shape[-1]
        while self._held > self._window_size:
            oldest = self._rows(PREDICTIONS)[0].shape[-1]
            leaving = min(self._held - self._window_size, oldest)
            for name in batch:
                parts = self._rows(name)
                parts[0] = parts[0][..., leaving:]
                if leaving == oldest:
                    parts.pop(0)
            self._held -= leaving

    def pre_compute(self) -> None:
        """Make one tensor of what many batches left, so that it is done once."""
        for name in (PREDICTIONS, LABELS, WEIGHTS, *((GROUPING_KEYS,) if self._grouped else ())):
            setattr(self, name, [in_one(self._rows(name))])

    def reset(self) -> None:
        """Forget all examples."""
        super().reset()
        self._held = 0

    def _rows(self, name: str) -> list[Tensor]:
        return cast("list[Tensor]", getattr(self, name))

    def _window(self) -> tuple[Tensor, Tensor, Tensor]:
        """Predictions, labels and weights ``[T, N]``."""
        predictions, labels, weights = (
            in_one(self._rows(name)) for name in (PREDICTIONS, LABELS, WEIGHTS)
        )
        return predictions, labels, weights

    def _groups(self) -> Tensor:
        """The groups ``[N]``."""
        return in_one(self._rows(GROUPING_KEYS))
