"""The names that programs import from ``torchrec.distributed.planner.estimator.estimator``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.estimator.factory import (
    EmbeddingPerfEstimatorFactory as EmbeddingPerfEstimatorFactory,
)
from tessera.training.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator as EmbeddingPerfEstimator,
)
