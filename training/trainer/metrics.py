"""The metrics of a click model over one pass: AUC, normalised entropy, log loss, calibration.

``N`` rows; scores are logits ``[N]`` unless a function says probabilities; labels are 0 or 1.
AUC needs every score at once; a `BinaryMetrics` holds five bytes a row for it (a float32 logit
and a uint8 label) and streams the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.training.metrics.binary import (
    auc,
    binary_entropy,
    row_log_loss,
    row_log_loss_of_logits,
    sigmoid,
)

FloatArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one pass over a split; NaN where one is not defined.

    Attributes:
        rows: rows seen.
        positives: rows with label 1.
        auc: probability that a positive row outranks a negative one, ties counting one half;
            NaN unless both labels occur.
        log_loss: mean negative log likelihood, in nats.
        normalised_entropy: log loss over the entropy of the mean label (He et al. 2014,
            "Practical lessons from predicting clicks on ads at Facebook"); below 1 is better
            than the mean; NaN unless both labels occur.
        calibration: mean prediction over mean label; NaN without positives.
    """

    rows: int
    positives: int
    auc: float
    log_loss: float
    normalised_entropy: float
    calibration: float

    def to_json(self) -> dict[str, int | float | None]:
        """The fields by name; a metric that is not defined is None, as JSON has no NaN."""
        return json_of(vars(self))

    @property
    def loss(self) -> float:
        """The mean loss of a row."""
        return self.log_loss


def json_of(metrics: Mapping[str, int | float]) -> dict[str, int | float | None]:
    """The metrics with None in the place of NaN."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in metrics.items()
    }


class BinaryMetrics:
    """Collects the logits and labels of one pass and computes an `Evaluation`.

    Holds ``5 * capacity`` bytes.
    """

    def __init__(self, capacity: int) -> None:
        self._logits = np.empty(capacity, dtype=np.float32)
        self._labels = np.empty(capacity, dtype=np.uint8)
        self._rows = 0
        self._loss_sum = 0.0
        self._prediction_sum = 0.0

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """The logits so far, ``[N]``."""
        return self._logits[: self._rows]

    @property
    def labels(self) -> npt.NDArray[np.uint8]:
        """The labels so far, ``[N]``."""
        return self._labels[: self._rows]

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch: logits ``[B]`` and labels ``[B]``, floating, on any device."""
        x = logits.detach().cpu().numpy().astype(np.float64)
        y = labels.detach().cpu().numpy()
        stop = self._rows + len(x)
        assert stop <= len(self._logits), "more rows than the split was said to have"
        self._logits[self._rows : stop] = x
        self._labels[self._rows : stop] = y
        self._rows = stop
        with np.errstate(invalid="ignore", over="ignore"):  # who trains is told of what diverged
            self._loss_sum += float(np.sum(row_log_loss_of_logits(x, y)))
            self._prediction_sum += float(np.sum(sigmoid(x)))

    def compute(self) -> Evaluation:
        """The metrics of all rows so far."""
        positives = int(np.count_nonzero(self.labels))
        return _evaluation(
            rows=self._rows,
            positives=positives,
            auc=auc(self.logits, self.labels),
            loss_sum=self._loss_sum,
            prediction_sum=self._prediction_sum,
        )


def evaluate_probabilities(probabilities: FloatArray, labels: npt.NDArray[Any]) -> Evaluation:
    """The metrics of predictions ``[N]`` in ``[0, 1]``, as a served model gives them.

    A prediction of exactly 0 or 1 is moved inside by the resolution of its type, so that the
    log loss stays finite.
    """
    return _evaluation(
        rows=len(labels),
        positives=int(np.count_nonzero(labels)),
        auc=auc(probabilities, labels),
        loss_sum=float(np.sum(row_log_loss(probabilities, labels))),
        prediction_sum=float(np.sum(probabilities, dtype=np.float64)),
    )


def _evaluation(
    *, rows: int, positives: int, auc: float, loss_sum: float, prediction_sum: float
) -> Evaluation:
    log_loss = loss_sum / rows if rows else math.nan
    both = 0 < positives < rows
    return Evaluation(
        rows=rows,
        positives=positives,
        auc=auc,
        log_loss=log_loss,
        normalised_entropy=log_loss / binary_entropy(positives / rows) if both else math.nan,
        calibration=prediction_sum / positives if positives else math.nan,
    )
