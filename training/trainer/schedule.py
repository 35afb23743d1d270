"""The learning rate's factor as a pure function of the step."""

from __future__ import annotations

import math

from tessera.training.config import ScheduleConfig


def learning_rate_factor(schedule: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The factor on the learning rates of step ``step`` (from 0) of ``total_steps``.

    Warm-up ends with factor 1 at step ``warmup_steps``; a decay reaches ``final_factor`` at
    the last step.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    final = schedule.final_factor or 0.0
    decay_steps = max(1, total_steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    left = 1.0 - done if schedule.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2.0
    return final + (1.0 - final) * left
