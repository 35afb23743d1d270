"""The names of ``torchrec.distributed.object_pool``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.pools.sharded_pool import (
    ShardedObjectPool as ShardedObjectPool,
)
