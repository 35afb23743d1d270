"""The names that programs import from ``torchrec.distributed.planner.estimator.types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.planner.estimator.factory import (
    HardwarePerfConfig as HardwarePerfConfig,
)
