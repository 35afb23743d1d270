"""The metrics of one pass over a split, of every label by its task.

Shapes: ``N`` rows, ``B`` of them in a batch, ``L`` labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tessera.training.data.columns import LabelColumn
from tessera.training.metrics.binary import BINARY_METRICS, sigmoid
from tessera.training.metrics.estimate import Numbers, codes_of
from tessera.training.metrics.regression import REGRESSION_METRICS
from tessera.training.trainer.metrics import BinaryMetrics, Evaluation, json_of
from tessera.training.trainer.retrieval_metrics import RetrievalEvaluation

MOST_ROWS_OF_ERRORS = 5_000_000
"""Standard errors of more rows are not computed: they would take some 100 bytes a row while one is computed, and be very small."""


@dataclass(frozen=True, kw_only=True)
class RegressionEvaluation:
    """The metrics of a label of the task regression; NaN where one is not defined.

    Attributes:
        rows: rows seen.
        mean_squared_error: of the predictions.
        root_mean_squared_error: its root, in the label's unit.
        mean_absolute_error: in the label's unit.
        r_squared: 1 minus the mean squared error over the labels' variance; NaN if they are all
            the same.
        calibration: mean prediction over mean label; NaN where that is 0.
    """

    rows: int
    mean_squared_error: float
    root_mean_squared_error: float
    mean_absolute_error: float
    r_squared: float
    calibration: float

    @property
    def loss(self) -> float:
        """The mean loss of a row."""
        return self.mean_squared_error

    def to_json(self) -> dict[str, int | float | None]:
        """The fields by name; a metric that is not defined is None."""
        return json_of(vars(self))


class RegressionMetrics:
    """Collects the predictions and labels of one pass: ``8 * capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self._predictions = np.empty(capacity, dtype=np.float32)
        self._labels = np.empty(capacity, dtype=np.float32)
        self._rows = 0

    @property
    def predictions(self) -> npt.NDArray[np.float32]:
        """The predictions so far, ``[N]``."""
        return self._predictions[: self._rows]

    @property
    def labels(self) -> npt.NDArray[np.float32]:
        """The labels so far, ``[N]``."""
        return self._labels[: self._rows]

    def update(self, predictions: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch: predictions ``[B]`` and labels ``[B]``, floating, on any device."""
        stop = self._rows + len(labels)
        assert stop <= len(self._labels), "more rows than the split was said to have"
        self._predictions[self._rows : stop] = predictions.detach().cpu().numpy()
        self._labels[self._rows : stop] = labels.detach().cpu().numpy()
        self._rows = stop

    def compute(self) -> RegressionEvaluation:
        """The metrics of all rows so far."""
        if not self._rows:
            nan = math.nan
            return RegressionEvaluation(
                rows=0,
                mean_squared_error=nan,
                root_mean_squared_error=nan,
                mean_absolute_error=nan,
                r_squared=nan,
                calibration=nan,
            )
        predictions, labels = self.predictions.astype(np.float64), self.labels.astype(np.float64)
        errors = predictions - labels
        squared = float(np.mean(errors**2))
        variance, mean = float(np.var(labels)), float(np.mean(labels))
        return RegressionEvaluation(
            rows=self._rows,
            mean_squared_error=squared,
            root_mean_squared_error=math.sqrt(squared),
            mean_absolute_error=float(np.mean(np.abs(errors))),
            r_squared=1.0 - squared / variance if variance else math.nan,
            calibration=float(np.mean(predictions)) / mean if mean else math.nan,
        )


LabelEvaluation = Evaluation | RegressionEvaluation
LabelMetrics = BinaryMetrics | RegressionMetrics

_COLLECTORS: dict[str, type[LabelMetrics]] = {
    "binary": BinaryMetrics,
    "regression": RegressionMetrics,
}


@dataclass(frozen=True, kw_only=True)
class SplitEvaluation:
    """The metrics of one pass over a split.

    Attributes:
        by_label: those of each label.
        loss: the sum over the labels of their mean losses, each times its weight.
        retrieval: of a model for retrieval, how good its best items are.
    """

    by_label: dict[str, LabelEvaluation]
    loss: float
    retrieval: RetrievalEvaluation | None = None

    def value(self, metric: Literal["auc", "log_loss", "recall", "ndcg"]) -> float:
        """What the best checkpoint is chosen by; NaN where it is not defined."""
        if metric in {"recall", "ndcg"}:
            return math.nan if self.retrieval is None else float(getattr(self.retrieval, metric))
        return self.auc if metric == "auc" else self.loss

    @property
    def auc(self) -> float:
        """The mean over the binary labels whose AUC is defined; NaN without one."""
        found = [e.auc for e in self.by_label.values() if isinstance(e, Evaluation)]
        defined = [auc for auc in found if not math.isnan(auc)]
        return sum(defined) / len(defined) if defined else math.nan

    @property
    def only(self) -> LabelEvaluation | None:
        """The metrics of the label, if there is one alone."""
        return next(iter(self.by_label.values())) if len(self.by_label) == 1 else None

    def to_json(self) -> dict[str, int | float | None]:
        """The metrics of one label by name; of several also ``loss`` and ``auc``, the mean.

        Of a model for retrieval they are those of retrieval and the AUC: its scores are not probabilities.
        The names of several labels' metrics begin with the label's: ``clicked.auc``.
        """
        if self.retrieval is not None and isinstance(self.only, Evaluation):
            own = {name: getattr(self.only, name) for name in ("rows", "positives", "auc")}
            return json_of(own) | self.retrieval.to_json()
        if self.only is not None:
            return self.only.to_json()
        return {
            **json_of({"loss": self.loss, "auc": self.auc}),
            **{
                f"{label}.{metric}": value
                for label, evaluation in self.by_label.items()
                for metric, value in evaluation.to_json().items()
            },
        }


class SplitMetrics:
    """Collects what a pass over a split gives for each label.

    Args:
        labels: what is predicted.
        weights: what each label's loss counts.
        capacity: rows of the split.
    """

    def __init__(
        self, labels: Sequence[LabelColumn], weights: Sequence[float], capacity: int
    ) -> None:
        self.by_label: dict[str, LabelMetrics] = {
            label.name: _COLLECTORS[label.task](capacity) for label in labels
        }
        self._weights = tuple(weights)
        self.retrieval: RetrievalEvaluation | None = None
        self._users: list[npt.NDArray[np.int64]] = []
        self._known: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in self.by_label}

    def add_users(self, users: npt.NDArray[np.int64]) -> None:
        """Add whose the rows of one batch are, ``[B]``; of every batch, or of none."""
        self._users.append(users)

    def update(self, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add one batch: the model's outputs and the labels, both ``[B, L]``.

        Rows whose label is not known (NaN) do not count for that label.
        """
        for place, (name, metrics) in enumerate(self.by_label.items()):
            wanted = labels[:, place]
            known = ~torch.isnan(wanted)
            if self._users:
                self._known[name].append(known.cpu().numpy())
            metrics.update(outputs[:, place][known], wanted[known])

    def compute(self) -> SplitEvaluation:
        """The metrics of all rows so far."""
        by_label: dict[str, Any] = {
            name: metrics.compute() for name, metrics in self.by_label.items()
        }
        losses = zip(self._weights, by_label.values(), strict=True)
        return SplitEvaluation(
            by_label=by_label,
            loss=sum(weight * found.loss for weight, found in losses),
            retrieval=self.retrieval,
        )

    def standard_errors(self) -> dict[str, dict[str, float]]:
        """By label and metric, the standard errors: clustered by user if the users are known.

        Empty for a label with more than `MOST_ROWS_OF_ERRORS` rows.
        """
        found: dict[str, dict[str, float]] = {}
        users = codes_of(np.concatenate(self._users)) if self._users else None
        for name, metrics in self.by_label.items():
            found[name] = {}
            if len(metrics.labels) > MOST_ROWS_OF_ERRORS:
                continue
            clusters = None
            if users is not None and self._known[name]:
                clusters = codes_of(users[np.concatenate(self._known[name])])
            predictions: Numbers
            if isinstance(metrics, BinaryMetrics):
                predictions, estimates = sigmoid(metrics.logits), BINARY_METRICS
            else:
                predictions, estimates = metrics.predictions, REGRESSION_METRICS
            with np.errstate(invalid="ignore", over="ignore"):  # of what diverged
                for metric, estimate in estimates.items():
                    error = estimate(predictions, metrics.labels, None).standard_error(clusters)
                    found[name][metric] = error
        return found
