"""The names of ``torchrec.distributed.embedding_types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.collections.sharded_collection import (
    ShardedEmbeddingModule as ShardedEmbeddingModule,
)
from tessera.training.distributed.collections.sharders import (
    BaseEmbeddingSharder as BaseEmbeddingSharder,
    BaseQuantEmbeddingSharder as BaseQuantEmbeddingSharder,
)
from tessera.training.distributed.sharding.interfaces import (
    FeatureShardingMixIn as FeatureShardingMixIn, ModuleShardingMixIn as ModuleShardingMixIn,
)
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup as BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor as BaseGroupedFeatureProcessor, OptimType as OptimType,
)
from tessera.training.distributed.tables.table_shards import (
    EmbeddingAttributes as EmbeddingAttributes, EmbeddingComputeKernel as EmbeddingComputeKernel,
    GroupedEmbeddingConfig as GroupedEmbeddingConfig, ShardedConfig as ShardedConfig,
    ShardedEmbeddingTable as ShardedEmbeddingTable, ShardedMetaConfig as ShardedMetaConfig,
    compute_kernel_to_embedding_location as compute_kernel_to_embedding_location,
)
from tessera.training.distributed.travel.kjt_list import (
    KJTList as KJTList, ListOfKJTList as ListOfKJTList,
)
from tessera.training.modules.embedding_configs import (
    DataType as DataType, EmbeddingTableConfig as EmbeddingTableConfig,
)
from tessera.training.distributed.plan.plan_types import ShardingType as ShardingType
from tessera.training.distributed.plan.sharded_module import ModuleSharder as ModuleSharder
