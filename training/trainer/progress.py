"""How far a run is: the small state that a checkpoint keeps beside the tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from tessera.training.distributed.checkpoint.basics import CheckpointError
from tessera.training.trainer.split_metrics import SplitEvaluation


@dataclass(frozen=True, kw_only=True)
class Before:
    """What the runs had done that a run goes on from (``--continue``); nothing where it began anew.

    Attributes:
        steps: their finished steps.
        epochs: epochs that they had begun.
        samples: samples of their steps.
        stream_rows: the first rows of this run's growing folder, which they were trained on.
    """

    steps: int = 0
    epochs: int = 0
    samples: int = 0
    stream_rows: int = 0


@dataclass
class Progress:
    """The position in the data and what was seen so far.

    Attributes:
        epoch: the epoch of the next batch, from 0, in this run.
        batch: the number of the next batch in its epoch.
        step: finished steps, those before this run included.
        samples: samples of these steps.
        loss_sum: sum of the losses of the steps since the last logged row.
        loss_steps: how many these are.
        evaluation_due: an evaluation belongs to the last step and is not finished yet.
        best_step: step of the best evaluation so far; None: there was none.
        best_metric: the metric of that step.
        evaluations_since_best: evaluations in a row without a better one.
        best_evaluation: all metrics of the best step.
        done: training has ended (last epoch or patience); final evaluation may be missing.
        before: what was done before this run.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    evaluation_due: bool = False
    best_step: int | None = None
    best_metric: float | None = None
    evaluations_since_best: int = 0
    best_evaluation: dict[str, int | float | None] | None = None
    done: bool = False
    before: Before = Before()

    @classmethod
    def behind(cls, before: Before) -> Progress:
        """Where a run begins that goes on from others."""
        return cls(step=before.steps, samples=before.samples, before=before)

    @property
    def epochs(self) -> int:
        """Epochs begun so far, counting the one that the last step belongs to, and those before."""
        return self.before.epochs + self.epoch + (1 if self.batch else 0)

    @property
    def stream_rows(self) -> int:
        """Rows of the growing folder that were trained on."""
        return self.before.stream_rows + self.samples - self.before.samples

    def count_step(self, *, samples: int) -> None:
        """One more step of ``samples`` samples; `count_loss` takes its loss, now or later."""
        self.batch += 1
        self.step += 1
        self.samples += samples

    def count_loss(self, loss: float) -> None:
        """The mean loss of the oldest step whose loss was not counted yet."""
        self.loss_sum += loss
        self.loss_steps += 1

    def take_mean_loss(self) -> float:
        """The mean loss since the last call; there must have been a step."""
        assert self.loss_steps > 0
        mean = self.loss_sum / self.loss_steps
        self.loss_sum, self.loss_steps = 0.0, 0
        return mean

    def count_evaluation(
        self, evaluation: SplitEvaluation, *, metric: Literal["auc", "log_loss", "recall", "ndcg"]
    ) -> bool:
        """Take note of an evaluation of the last step; returns whether it is the best so far.

        A metric that is not defined (NaN) is never better than another, but as the first one
        it counts, so that there always is a best checkpoint.
        """
        value = evaluation.value(metric)
        best = self.best_metric
        sign = -1.0 if metric == "log_loss" else 1.0
        better = (
            best is None
            or (math.isnan(best) and not math.isnan(value))
            or sign * value > sign * best
        )
        if better:
            self.best_step, self.best_metric = self.step, value
            self.best_evaluation = evaluation.to_json()
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
        self.evaluation_due = False
        return better

    def to_plain(self) -> dict[str, Any]:
        """The fields by name; `from_plain` is the inverse."""
        return asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, Any], path: Path) -> Progress:
        """What `to_plain` gave, as the checkpoint ``path`` holds it.

        Raises:
            CheckpointError: a field is missing.
        """
        values = {"before": {}, **values}  # checkpoints of earlier Tesseras have none
        missing = [item.name for item in fields(cls) if item.name not in values]
        if missing:
            raise CheckpointError(
                f"{path} does not fit this version of Tessera: its progress lacks"
                f" {', '.join(missing)}"
            )
        known = {item.name: values[item.name] for item in fields(cls)}
        try:
            return cls(**{**known, "before": Before(**known["before"])})
        except TypeError as error:
            raise CheckpointError(
                f"{path} does not fit this version of Tessera: its progress has another 'before'"
            ) from error
