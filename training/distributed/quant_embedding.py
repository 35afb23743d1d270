"""The names of ``torchrec.distributed.quant_embedding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.inference.sharded import (
    QuantEmbeddingCollection as QuantEmbeddingCollection,
    QuantEmbeddingCollectionSharder as QuantEmbeddingCollectionSharder,
    ShardedQuantEmbeddingCollection as ShardedQuantEmbeddingCollection,
)
