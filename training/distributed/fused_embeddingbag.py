"""The names of ``torchrec.distributed.fused_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.fused_sharded import (
    FusedEmbeddingBagCollectionSharder as FusedEmbeddingBagCollectionSharder,
    ShardedFusedEmbeddingBagCollection as ShardedFusedEmbeddingBagCollection,
)
