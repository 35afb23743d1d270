"""The names of ``torchrec.distributed.planner.estimator.config``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.estimator.coefficients import (
    EstimatorPerfCoefficients as EstimatorPerfCoefficients, PerfCoefficient as PerfCoefficient,
    PerfCoefficientConfig as PerfCoefficientConfig,
)
from tessera.training.distributed.planner.estimator.factory import (
    EmbeddingPerfEstimatorConfig as EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory as EmbeddingPerfEstimatorFactory,
)
from tessera.training.distributed.planner.estimator.hardware_config import (
    HardwarePerfConfig as HardwarePerfConfig,
)
