"""Estimates of time for named kinds of hardware."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.planner.estimator.annotations import (
    backward_compute as backward_compute, bwd_coefficient as bwd_coefficient,
    device_bw as device_bw, forward_compute as forward_compute,
    fwd_coefficient as fwd_coefficient, output_write_size as output_write_size,
    prefetch_coefficient as prefetch_coefficient, ssd_mem_bw as ssd_mem_bw,
    supported_sharding_types as supported_sharding_types,
)
from tessera.training.distributed.planner.estimator.coefficients import (
    EstimatorPerfCoefficients as EstimatorPerfCoefficients, PerfCoefficient as PerfCoefficient,
    PerfCoefficientConfig as PerfCoefficientConfig, PrefetchCoefficients as PrefetchCoefficients,
)
from tessera.training.distributed.planner.estimator.context import (
    ShardPerfContext as ShardPerfContext,
)
from tessera.training.distributed.planner.estimator.factory import (
    EmbeddingPerfEstimatorConfig as EmbeddingPerfEstimatorConfig,
    EmbeddingPerfEstimatorFactory as EmbeddingPerfEstimatorFactory,
    EmbeddingPerfEstimatorV2 as EmbeddingPerfEstimatorV2,
)
from tessera.training.distributed.planner.estimator.hardware_config import (
    HardwarePerfConfig as HardwarePerfConfig,
)
