"""The names of ``torchrec.distributed.embeddingbag``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.pooled import (
    EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection,
)
from tessera.training.distributed.collections.pooled_output import (
    EmbeddingBagCollectionAwaitable as EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext as EmbeddingBagCollectionContext,
    construct_output_kt as construct_output_kt,
)
from tessera.training.distributed.collections.single_bag import (
    EmbeddingAwaitable as EmbeddingAwaitable, EmbeddingBagSharder as EmbeddingBagSharder,
    ShardedEmbeddingBag as ShardedEmbeddingBag,
)
from tessera.training.distributed.sharding.creation import (
    create_embedding_bag_sharding as create_embedding_bag_sharding,
    create_sharding_infos_by_sharding as create_sharding_infos_by_sharding,
    replace_placement_with_meta_device as replace_placement_with_meta_device,
)
