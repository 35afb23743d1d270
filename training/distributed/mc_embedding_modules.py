"""The names of ``torchrec.distributed.mc_embedding_modules``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.mc_tables import (
    BaseManagedCollisionEmbeddingCollectionSharder as BaseManagedCollisionEmbeddingCollectionSharder,
    BaseShardedManagedCollisionEmbeddingCollection as BaseShardedManagedCollisionEmbeddingCollection,
)
from tessera.training.distributed.plan.sharded_module import ShrdCtx as ShrdCtx
