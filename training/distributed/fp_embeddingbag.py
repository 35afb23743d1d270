"""The names of ``torchrec.distributed.fp_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.feature_processed import (
    FeatureProcessedEmbeddingBagCollectionSharder as FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection as ShardedFeatureProcessedEmbeddingBagCollection,
)
