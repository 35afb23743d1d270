"""Estimates of time for named kinds of hardware."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.planner.estimator.factory import (
    EmbeddingPerfEstimatorConfig as EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory as EmbeddingPerfEstimatorFactory,
    HardwarePerfConfig as HardwarePerfConfig,
)
