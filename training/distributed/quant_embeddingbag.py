"""The names of ``torchrec.distributed.quant_embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.inference.collection import (
    ShardedQuantEbcInputDist as ShardedQuantEbcInputDist,
    create_infer_embedding_bag_sharding as create_infer_embedding_bag_sharding,
)
from tessera.training.distributed.inference.sharded import (
    QuantEmbeddingBagCollectionSharder as QuantEmbeddingBagCollectionSharder,
    ShardedQuantEmbeddingBagCollection as ShardedQuantEmbeddingBagCollection,
)
