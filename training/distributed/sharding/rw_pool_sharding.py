"""The names of ``torchrec.distributed.sharding.rw_pool_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.ids import (
    InferRwObjectPoolInputDist as InferRwObjectPoolInputDist,
    RwObjectPoolIDsDist as RwObjectPoolIDsDist,
)
