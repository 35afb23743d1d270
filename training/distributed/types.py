"""The names of ``torchrec.distributed.types``."""

# isort: skip_file
# fmt: off
# ruff: noqa: PLC0414 - type checkers offer a name that is imported as itself
from tessera.training.distributed.comm.awaitable import (
    Awaitable as Awaitable, GenericMeta as GenericMeta, LazyAwaitable as LazyAwaitable,
    LazyNoWait as LazyNoWait, NoWait as NoWait,
)
from tessera.training.distributed.comm.codec_types import (
    CommOp as CommOp, NoOpQuantizedCommCodec as NoOpQuantizedCommCodec,
    QuantizedCommCodec as QuantizedCommCodec, QuantizedCommCodecs as QuantizedCommCodecs,
)
from tessera.training.distributed.comm.environment import (
    ShardingEnv as ShardingEnv, rank_device as rank_device,
)
from tessera.training.distributed.comm.environment_2d import ShardingEnv2D as ShardingEnv2D
from tessera.training.distributed.model.replica_config import (
    DMPCollectionConfig as DMPCollectionConfig,
)
from tessera.training.distributed.plan.plan_types import (
    BoundsCheckMode as BoundsCheckMode, CacheAlgorithm as CacheAlgorithm,
    CacheParams as CacheParams, CacheStatistics as CacheStatistics,
    ComputeKernel as ComputeKernel,
    EmbeddingModuleShardingPlan as EmbeddingModuleShardingPlan,
    KeyValueParams as KeyValueParams,
    ModuleShardingPlan as ModuleShardingPlan,
    ObjectPoolShardingPlan as ObjectPoolShardingPlan,
    ObjectPoolShardingType as ObjectPoolShardingType, ParameterSharding as ParameterSharding,
    ParameterStorage as ParameterStorage, ShardingPlan as ShardingPlan,
    ShardingType as ShardingType,
)
from tessera.training.distributed.plan.sharded_module import (
    CompIn as CompIn, DistOut as DistOut, M as M, ModuleNoCopyMixin as ModuleNoCopyMixin,
    ModuleSharder as ModuleSharder, NullShardedModuleContext as NullShardedModuleContext,
    NullShardingContext as NullShardingContext, Out as Out, ShardedModule as ShardedModule,
    ShrdCtx as ShrdCtx, StorageUsageType as StorageUsageType,
    compute_storage_usage as compute_storage_usage, get_tensor_size_bytes as get_tensor_size_bytes,
)
from tessera.training.modules.embedding_configs import DataType as DataType
from tessera.training.streamable import (
    Multistreamable as Multistreamable, Pipelineable as Pipelineable,
)
from torch.distributed._shard.metadata import ShardMetadata as ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata as ShardedTensorMetadata, TensorProperties as TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as Shard
from torch.distributed._shard.sharding_spec.api import (
    EnumerableShardingSpec as EnumerableShardingSpec, ShardingSpec as ShardingSpec,
)
