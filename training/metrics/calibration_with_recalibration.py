"""Calibration of predictions that are first recalibrated for a sample of the negative examples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera.training.metrics.calibration import CalibrationMetricComputation
from tessera.training.metrics.metrics_namespace import MetricNamespace
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.recalibration import recalibrated
from tessera.training.metrics.sums import Sums


class RecalibratedCalibrationMetricComputation(CalibrationMetricComputation):
    """The sums of `RecalibratedCalibrationMetric`.

    Args:
        recalibration_coefficient: the share of negative examples that the model was trained on.
    """

    def __init__(self, *args: Any, recalibration_coefficient: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._coefficient = recalibration_coefficient

    def _of_batch(
        self, predictions: Tensor, labels: Tensor, weights: Tensor, **kwargs: Any
    ) -> Sums:
        predictions = recalibrated(predictions, self._coefficient)
        return super()._of_batch(predictions, labels, weights, **kwargs)


class RecalibratedCalibrationMetric(RecMetric):
    """Calibration of recalibrated predictions."""

    _namespace = MetricNamespace.RECALIBRATED_CALIBRATION
    _computation_class = RecalibratedCalibrationMetricComputation
