"""What a run says on stderr while it trains: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

from tessera.training.trainer.metrics import Evaluation
from tessera.training.trainer.split_metrics import LabelEvaluation, SplitEvaluation

PLAIN_LINE_SECONDS = 10.0


class Display:
    """Shows steps, losses and evaluations; nothing at all unless ``enabled``.

    Args:
        total_steps: steps of the whole run; None: nobody knows.
        first_step: steps that are finished already.
        stream: where to write; None: stderr.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        total_steps: int | None,
        first_step: int,
        enabled: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._stream = stream or sys.stderr
        self._clock = clock
        self._last_line = self._window_began = clock()
        self._window_samples = 0
        self._first_step = first_step
        self._began = clock()
        self._bar: tqdm[Any] | None = None
        if enabled and self._stream.isatty():
            self._bar = tqdm(
                total=total_steps, initial=first_step, unit="step", file=self._stream, smoothing=0.1
            )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        elif self._enabled:
            print(text, file=self._stream, flush=True)

    def step(self, *, step: int, samples: int, loss: float) -> None:
        """A step of ``samples`` samples with mean loss ``loss`` is finished."""
        if not self._enabled:
            return
        self._window_samples += samples
        if self._bar is not None:
            self._bar.update(1)
        now = self._clock()
        period = 0.5 if self._bar is not None else PLAIN_LINE_SECONDS
        if now - self._last_line < period:
            return
        rate = self._window_samples / max(now - self._window_began, 1e-9)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{rate:,.0f} samples/s, loss {loss:.5f}", refresh=False)
        else:
            said = f"{rate:,.0f} samples/s  loss {loss:.5f}"
            if self._total is None:
                self.say(f"step {step}  {said}")
            else:
                left = (self._total - step) * (now - self._began) / max(step - self._first_step, 1)
                self.say(f"step {step}/{self._total}  {said}  {left:.0f} s left")
        self._last_line = self._window_began = now
        self._window_samples = 0

    def evaluation(self, *, step: int, evaluation: SplitEvaluation, better: bool) -> None:
        """An evaluation on the validation rows is finished."""
        self.say(f"step {step}: {describe(evaluation)}{'  (best so far)' if better else ''}")

    def close(self) -> None:
        """Leave the terminal as it should be."""
        if self._bar is not None:
            self._bar.close()


def describe(evaluation: SplitEvaluation) -> str:
    """The metrics of an evaluation in one line."""
    if (found := evaluation.retrieval) is not None:
        auc = "" if math.isnan(evaluation.auc) else f"  AUC {evaluation.auc:.5f}"
        return f"recall@{found.k} {found.recall:.5f}  NDCG@{found.k} {found.ndcg:.5f}{auc}"
    if evaluation.only is not None:
        return _describe_label(evaluation.only)
    labels = [f"{name}: {_describe_label(own)}" for name, own in evaluation.by_label.items()]
    return "; ".join([f"loss {evaluation.loss:.5f}", *labels])


def _describe_label(evaluation: LabelEvaluation) -> str:
    if not isinstance(evaluation, Evaluation):
        return (
            f"RMSE {evaluation.root_mean_squared_error:.5f}  MAE"
            f" {evaluation.mean_absolute_error:.5f}  R2 {evaluation.r_squared:.5f}"
            f"  calibration {evaluation.calibration:.4f}"
        )
    return (
        f"AUC {evaluation.auc:.5f}  normalised entropy {evaluation.normalised_entropy:.5f}"
        f"  log loss {evaluation.log_loss:.5f}  calibration {evaluation.calibration:.4f}"
    )
