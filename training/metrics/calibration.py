"""Calibration: the sum of the predictions over that of the labels; above 1 the model promises too much.

Shapes: predictions, labels and weights ``[T, B]``; sums ``[T]``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tessera.training.metrics.metrics_namespace import (
    MetricName,
    MetricNameBase,
    MetricNamespace,
)
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.sums import Sums, SumsComputation, ratio, sums_together


def compute_calibration(calibration_num: Tensor, calibration_denom: Tensor) -> Tensor:
    """The calibration of sums ``[T]``; 0 without positive labels."""
    return ratio(calibration_num, calibration_denom.clamp(min=0))


def get_calibration_states(
    labels: Tensor, predictions: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """What a batch adds to the sums, each ``[T]``."""
    w = weights.double()
    return sums_together({"calibration_num": w * predictions, "calibration_denom": w * labels})


class CalibrationMetricComputation(SumsComputation):
    """The sums of `CalibrationMetric`."""

    _sums = ("calibration_num", "calibration_denom")

    def _of_batch(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor,
        **kwargs: Any,  # noqa: ARG002 - what other metrics of the list need
    ) -> Sums:
        return get_calibration_states(labels, predictions, weights)

    def _of_sums(self, sums: Sums) -> list[tuple[MetricNameBase, Tensor]]:
        predicted, seen = (sums[name] for name in self._sums)
        return [(MetricName.CALIBRATION, compute_calibration(predicted, seen))]


class CalibrationMetric(RecMetric):
    """Mean prediction over mean label."""

    _namespace = MetricNamespace.CALIBRATION
    _computation_class = CalibrationMetricComputation
