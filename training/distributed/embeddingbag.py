"""Pooled tables that are spread over ranks, under the module path that TorchRec users know."""

from tessera.training.distributed.embedding_bag import (
    EmbeddingAwaitable,
    EmbeddingBagSharder,
    ShardedEmbeddingBag,
)
from tessera.training.distributed.embeddingbag_output import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    construct_output_kt,
)
from tessera.training.distributed.embeddingbag_shardings import (
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
    replace_placement_with_meta_device,
)
from tessera.training.distributed.pooled_collection import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)

__all__ = [
    "EmbeddingAwaitable",
    "EmbeddingBagCollectionAwaitable",
    "EmbeddingBagCollectionContext",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "construct_output_kt",
    "create_embedding_bag_sharding",
    "create_sharding_infos_by_sharding",
    "replace_placement_with_meta_device",
]
