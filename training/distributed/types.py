"""The words that the parts of model parallelism share, in one place.

Each is defined in the module named for its subject: `awaitable`, `codec_types`, `plan_types`,
`sharded_module`.
"""

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec

from tessera.training.distributed.awaitable import (
    Awaitable,
    GenericMeta,
    LazyAwaitable,
    LazyNoWait,
    NoWait,
)
from tessera.training.distributed.codec_types import (
    CommOp,
    NoOpQuantizedCommCodec,
    QuantizedCommCodec,
    QuantizedCommCodecs,
)
from tessera.training.distributed.plan_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    ComputeKernel,
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ParameterStorage,
    ShardingPlan,
    ShardingType,
)
from tessera.training.distributed.sharded_module import (
    CompIn,
    DistOut,
    M,
    ModuleNoCopyMixin,
    ModuleSharder,
    NullShardedModuleContext,
    NullShardingContext,
    Out,
    ShardedModule,
    ShardingEnv,
    ShrdCtx,
    get_tensor_size_bytes,
    rank_device,
)
from tessera.training.modules.embedding_configs import DataType
from tessera.training.streamable import Multistreamable, Pipelineable

__all__ = [
    "Awaitable",
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CacheParams",
    "CommOp",
    "CompIn",
    "ComputeKernel",
    "DataType",
    "DistOut",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GenericMeta",
    "LazyAwaitable",
    "LazyNoWait",
    "M",
    "ModuleNoCopyMixin",
    "ModuleSharder",
    "ModuleShardingPlan",
    "Multistreamable",
    "NoOpQuantizedCommCodec",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "Out",
    "ParameterSharding",
    "ParameterStorage",
    "Pipelineable",
    "QuantizedCommCodec",
    "QuantizedCommCodecs",
    "Shard",
    "ShardMetadata",
    "ShardedModule",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingSpec",
    "ShardingType",
    "ShrdCtx",
    "TensorProperties",
    "get_tensor_size_bytes",
    "rank_device",
]
