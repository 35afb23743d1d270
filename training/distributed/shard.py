"""The names of ``torchrec.distributed.shard``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.model.shard import (
    Plan as Plan, _shard_modules as _shard_modules, shard as shard, shard_modules as shard_modules,
)
from tessera.training.distributed.plan.first_values import init_parameters as init_parameters
