"""The names of ``torchrec.distributed.mc_modules``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.managed_collisions import (
    ShardedManagedCollisionCollection as ShardedManagedCollisionCollection,
)
from tessera.training.distributed.collections.mc_tables import (
    ManagedCollisionCollectionAwaitable as ManagedCollisionCollectionAwaitable,
    ManagedCollisionCollectionSharder as ManagedCollisionCollectionSharder,
)
