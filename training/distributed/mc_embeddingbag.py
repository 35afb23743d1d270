"""The names of ``torchrec.distributed.mc_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.mc_tables import (
    ManagedCollisionEmbeddingBagCollectionContext as ManagedCollisionEmbeddingBagCollectionContext,
    ManagedCollisionEmbeddingBagCollectionSharder as ManagedCollisionEmbeddingBagCollectionSharder,
    ShardedManagedCollisionEmbeddingBagCollection as ShardedManagedCollisionEmbeddingBagCollection,
)
