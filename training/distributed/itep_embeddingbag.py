"""The names of ``torchrec.distributed.itep_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.itep import (
    ITEPEmbeddingBagCollectionContext as ITEPEmbeddingBagCollectionContext,
    ITEPEmbeddingBagCollectionSharder as ITEPEmbeddingBagCollectionSharder,
    ITEPEmbeddingCollectionContext as ITEPEmbeddingCollectionContext,
    ITEPEmbeddingCollectionSharder as ITEPEmbeddingCollectionSharder,
    ShardedITEPEmbeddingBagCollection as ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection as ShardedITEPEmbeddingCollection,
)
