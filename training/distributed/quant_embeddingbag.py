"""The names of ``torchrec.distributed.quant_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.inference.pooled import (
    QuantEmbeddingBagCollectionSharder as QuantEmbeddingBagCollectionSharder,
    ShardedQuantEbcInputDist as ShardedQuantEbcInputDist,
    ShardedQuantEmbeddingBagCollection as ShardedQuantEmbeddingBagCollection,
    create_infer_embedding_bag_sharding as create_infer_embedding_bag_sharding,
)
