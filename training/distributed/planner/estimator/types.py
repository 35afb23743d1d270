"""The names of ``torchrec.distributed.planner.estimator.types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.estimator.coefficients import (
    EstimatorPerfCoefficients as EstimatorPerfCoefficients, PerfCoefficient as PerfCoefficient,
    PerfCoefficientConfig as PerfCoefficientConfig, PrefetchCoefficients as PrefetchCoefficients,
)
from tessera.training.distributed.planner.estimator.context import (
    ShardPerfContext as ShardPerfContext,
)
from tessera.training.distributed.planner.estimator.hardware_config import (
    HardwarePerfConfig as HardwarePerfConfig,
)
