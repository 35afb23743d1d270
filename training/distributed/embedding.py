"""The names of ``torchrec.distributed.embedding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.unpooled import (
    EmbeddingCollectionAwaitable as EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext as EmbeddingCollectionContext,
    EmbeddingCollectionSharder as EmbeddingCollectionSharder,
    ShardedEmbeddingCollection as ShardedEmbeddingCollection,
)
from tessera.training.distributed.sharding.creation import (
    create_embedding_sharding as create_embedding_sharding,
    create_sharding_infos_by_sharding as create_sharding_infos_by_sharding,
)
from tessera.training.distributed.travel.padding import pad_vbe_kjt_lengths as pad_vbe_kjt_lengths
from tessera.training.distributed.travel.index_dedup import (
    get_ec_index_dedup as get_ec_index_dedup, set_ec_index_dedup as set_ec_index_dedup,
)
