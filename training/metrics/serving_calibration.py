"""Calibration of examples that were served, which are those with a weight, and their number."""

from __future__ import annotations

from tessera.training.metrics.calibration import CalibrationMetricComputation
from tessera.training.metrics.metrics_namespace import MetricNamespace
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.serving_counts import WeightedExamplesMixin


class ServingCalibrationMetricComputation(WeightedExamplesMixin, CalibrationMetricComputation):
    """The sums of `ServingCalibrationMetric`."""


class ServingCalibrationMetric(RecMetric):
    """Calibration of examples with a weight, and how many there were."""

    _namespace = MetricNamespace.SERVING_CALIBRATION
    _computation_class = ServingCalibrationMetricComputation
