"""The names of ``torchrec.distributed.embedding_tower_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.tower_sharders import (
    EmbeddingTowerCollectionSharder as EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder as EmbeddingTowerSharder,
)
from tessera.training.distributed.collections.towers import (
    ShardedEmbeddingTower as ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection as ShardedEmbeddingTowerCollection,
)
from tessera.training.distributed.collections.towers_on_nodes import (
    EmbeddingTowerCollectionContext as EmbeddingTowerCollectionContext,
    TowerLazyAwaitable as TowerLazyAwaitable,
)
