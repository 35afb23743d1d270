"""The names of ``torchrec.distributed.embedding_sharding``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingSharding as EmbeddingSharding,
)
from tessera.training.distributed.sharding.interfaces import (
    BaseEmbeddingDist as BaseEmbeddingDist, BaseSparseFeaturesDist as BaseSparseFeaturesDist,
    EmbeddingShardingContext as EmbeddingShardingContext,
    EmbeddingShardingInfo as EmbeddingShardingInfo, OutputColumns as OutputColumns,
)
from tessera.training.distributed.sharding.layout import group_tables as group_tables
from tessera.training.distributed.travel.bucketize import (
    bucketize_kjt_before_all2all as bucketize_kjt_before_all2all,
)
from tessera.training.distributed.travel.features_awaitable import (
    FusedKJTListSplitsAwaitable as FusedKJTListSplitsAwaitable,
    KJTListAwaitable as KJTListAwaitable, KJTListSplitsAwaitable as KJTListSplitsAwaitable,
    ListOfKJTListAwaitable as ListOfKJTListAwaitable,
    ListOfKJTListSplitsAwaitable as ListOfKJTListSplitsAwaitable,
)
from tessera.training.distributed.travel.kjt_all_to_all import (
    KJTSplitsAllToAllMeta as KJTSplitsAllToAllMeta,
)
