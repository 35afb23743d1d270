"""Normalised entropy of examples that were served, which are those with a weight, and their number."""

from __future__ import annotations

from tessera.training.metrics.metrics_namespace import MetricNamespace
from tessera.training.metrics.ne import NEMetricComputation
from tessera.training.metrics.rec_metric import RecMetric
from tessera.training.metrics.serving_counts import WeightedExamplesMixin


class ServingNEMetricComputation(WeightedExamplesMixin, NEMetricComputation):
    """The sums of `ServingNEMetric`."""


class ServingNEMetric(RecMetric):
    """Normalised entropy of examples with a weight, and how many there were."""

    _namespace = MetricNamespace.SERVING_NE
    _computation_class = ServingNEMetricComputation
