"""Examples of all ranks per second: since the training began, since the process began, and of a window.

Each call of `ThroughputMetric.update` is a batch on every rank.  The first batches are not timed, as they
include what is done once.  State dicts hold what the whole training has done, so a training that is continued
goes on counting.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.metrics.metrics_config import BatchSizeStage, validate_batch_size_stages
from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNamespace,
    MetricPrefix,
    compose_metric_key,
)

MAX_WINDOW_TS = 2 * 60 * 60
"""Seconds that a window holds at most, and batches."""

_log = logging.getLogger(__name__)


class ThroughputMetric(nn.Module):
    """Counts examples and times batches.

    Args:
        batch_size: examples of a rank's batch.
        world_size: ranks.
        window_seconds: seconds that the window holds, at most 7200.
        warmup_steps: batches at the beginning that are not timed.
        batch_size_stages: batch sizes that change; the last has no end. None: ``batch_size`` always.

    Raises:
        ValueError: a window or a warm-up below 1, or stages that do not fit.
    """

    _namespace = MetricNamespace.THROUGHPUT
    _metric_name = MetricName.THROUGHPUT

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: list[BatchSizeStage] | None = None,
    ) -> None:
        super().__init__()
        if window_seconds < 1:
            raise ValueError(f"window_seconds={window_seconds}; give at least 1")
        if warmup_steps < 1:
            raise ValueError(
                f"warmup_steps={warmup_steps}; give at least 1, which starts the clock"
            )
        if window_seconds > MAX_WINDOW_TS:
            _log.warning(
                "window_seconds=%d is more than %d, which is taken", window_seconds, MAX_WINDOW_TS
            )
        validate_batch_size_stages(batch_size_stages)
        self._batch_size = batch_size
        self._world_size = world_size
        self._window_seconds = min(window_seconds, MAX_WINDOW_TS)
        self._warmup_steps = warmup_steps
        self._stages = list(batch_size_stages) if batch_size_stages else None
        self._num_batch = 0  # of the whole training
        self._steps = 0  # of this process
        self._previous_ts = 0.0
        self._window: deque[tuple[float, int]] = deque()  # seconds and examples of each batch
        self._window_time = 0.0
        self.total_examples: Tensor
        self.warmup_examples: Tensor
        self.time_lapse_after_warmup: Tensor
        self.attempt_examples: Tensor
        self.attempt_warmup_examples: Tensor
        self.attempt_time_lapse_after_warmup: Tensor
        for name, dtype, persistent in (
            ("total_examples", torch.int64, True),
            ("warmup_examples", torch.int64, True),
            ("time_lapse_after_warmup", torch.float64, True),
            ("attempt_examples", torch.int64, False),
            ("attempt_warmup_examples", torch.int64, False),
            ("attempt_time_lapse_after_warmup", torch.float64, False),
        ):
            self.register_buffer(name, torch.zeros((), dtype=dtype), persistent=persistent)

    def update(self) -> None:
        """Count a batch that was trained just now."""
        now = time.monotonic()
        self._steps += 1
        self._num_batch += 1
        examples = self._current_batch_size() * self._world_size
        self._add(examples, "total_examples", "attempt_examples")
        if self._steps <= self._warmup_steps:
            self._add(examples, "warmup_examples", "attempt_warmup_examples")
        else:
            seconds = now - self._previous_ts
            self._add(seconds, "time_lapse_after_warmup", "attempt_time_lapse_after_warmup")
            self._window.append((seconds, examples))
            self._window_time += seconds
            while self._window_time > self._window_seconds or len(self._window) > MAX_WINDOW_TS:
                self._window_time -= self._window.popleft()[0]
        self._previous_ts = now

    def compute(self) -> dict[str, Tensor]:
        """The examples so far, and once a batch was timed, examples per second, by their keys."""
        values = {
            self._key(MetricName.TOTAL_EXAMPLES): self.total_examples.detach().clone(),
            self._key(MetricName.ATTEMPT_EXAMPLES): self.attempt_examples.detach().clone(),
        }
        if self._steps > self._warmup_steps:
            window_s = sum(seconds for seconds, _ in self._window)
            in_window = sum(examples for _, examples in self._window)
            for prefix, examples, seconds in (
                (
                    MetricPrefix.LIFETIME,
                    float(self.total_examples - self.warmup_examples),
                    float(self.time_lapse_after_warmup),
                ),
                (
                    MetricPrefix.ATTEMPT,
                    float(self.attempt_examples - self.attempt_warmup_examples),
                    float(self.attempt_time_lapse_after_warmup),
                ),
                (MetricPrefix.WINDOW, float(in_window), window_s),
            ):
                if seconds > 0 or prefix is MetricPrefix.WINDOW:
                    rate = examples / seconds if seconds > 0 else 0.0
                    values[self._key(MetricName.THROUGHPUT, prefix)] = torch.tensor(
                        rate, dtype=torch.float64
                    )
        if self._stages is not None:
            values[self._key(MetricName.BATCH_SIZE)] = torch.tensor(
                self._current_batch_size(), dtype=torch.int32
            )
        return values

    def _current_batch_size(self) -> int:
        for stage in self._stages or ():
            if stage.max_iters is None or self._num_batch <= stage.max_iters:
                return stage.batch_size
        return self._batch_size

    def _add(self, amount: float, *names: str) -> None:
        for name in names:
            self.get_buffer(name).add_(amount)

    def _key(self, name: MetricName, prefix: MetricPrefix = MetricPrefix.DEFAULT) -> str:
        return compose_metric_key(self._namespace, str(self._namespace), name, prefix)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 - torch's
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._stages is not None:
            destination[f"{prefix}num_batch"] = torch.tensor(self._num_batch, dtype=torch.int64)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        batches = state_dict.pop(f"{prefix}num_batch", None)
        if batches is not None and self._stages is not None:
            self._num_batch = int(batches)
        super()._load_from_state_dict(state_dict, prefix, *rest)
