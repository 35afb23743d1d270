"""The names of ``torchrec.distributed.mc_embedding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.mc_tables import (
    ManagedCollisionEmbeddingCollectionContext as ManagedCollisionEmbeddingCollectionContext,
    ManagedCollisionEmbeddingCollectionSharder as ManagedCollisionEmbeddingCollectionSharder,
    ShardedManagedCollisionEmbeddingCollection as ShardedManagedCollisionEmbeddingCollection,
)
