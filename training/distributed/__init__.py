"""Model parallelism: tables spread over ranks and fused with their optimizer."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.distributed.collections.feature_processed import (
        FeatureProcessedEmbeddingBagCollectionSharder as FeatureProcessedEmbeddingBagCollectionSharder,
        ShardedFeatureProcessedEmbeddingBagCollection as ShardedFeatureProcessedEmbeddingBagCollection,
    )
    from tessera.training.distributed.collections.pooled import (
        EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder,
        ShardedEmbeddingBagCollection as ShardedEmbeddingBagCollection,
    )
    from tessera.training.distributed.collections.single_bag import (
        EmbeddingBagSharder as EmbeddingBagSharder, ShardedEmbeddingBag as ShardedEmbeddingBag,
    )
    from tessera.training.distributed.collections.unpooled import (
        EmbeddingCollectionSharder as EmbeddingCollectionSharder,
        ShardedEmbeddingCollection as ShardedEmbeddingCollection,
    )
    from tessera.training.distributed.comm.awaitable import (
        Awaitable as Awaitable, LazyAwaitable as LazyAwaitable, LazyNoWait as LazyNoWait,
        NoWait as NoWait,
    )
    from tessera.training.distributed.comm.codecs import (
        CommType as CommType, QCommsConfig as QCommsConfig,
        get_qcomm_codecs_registry as get_qcomm_codecs_registry,
    )
    from tessera.training.distributed.comm.environment import ShardingEnv as ShardingEnv
    from tessera.training.distributed.comm.nodes import (
        get_local_rank as get_local_rank, get_local_size as get_local_size,
    )
    from tessera.training.distributed.comm.request import (
        get_gradient_division as get_gradient_division,
        set_gradient_division as set_gradient_division,
    )
    from tessera.training.distributed.model.data_parallel import (
        DataParallelWrapper as DataParallelWrapper,
        DefaultDataParallelWrapper as DefaultDataParallelWrapper,
    )
    from tessera.training.distributed.model.model_parallel import (
        DistributedModelParallel as DistributedModelParallel, get_module as get_module,
        get_unwrapped_module as get_unwrapped_module,
    )
    from tessera.training.distributed.plan.plan_types import (
        EmbeddingModuleShardingPlan as EmbeddingModuleShardingPlan,
        ParameterSharding as ParameterSharding, ShardingPlan as ShardingPlan,
        ShardingType as ShardingType,
    )
    from tessera.training.distributed.plan.sharded_module import (
        ModuleSharder as ModuleSharder, ShardedModule as ShardedModule,
    )
    from tessera.training.distributed.planner.constraints import (
        ParameterConstraints as ParameterConstraints,
    )
    from tessera.training.distributed.planner.generators import (
        construct_module_sharding_plan as construct_module_sharding_plan,
        get_default_sharders as get_default_sharders,
    )
    from tessera.training.distributed.planner.hardware import Topology as Topology
    from tessera.training.distributed.planner.planners import (
        EmbeddingShardingPlanner as EmbeddingShardingPlanner,
    )
    from tessera.training.distributed.train_pipeline.pipelines import (
        TrainPipelineBase as TrainPipelineBase,
    )
    from tessera.training.distributed.train_pipeline.prefetch import (
        PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist,
    )
    from tessera.training.distributed.train_pipeline.sparse_dist import (
        TrainPipelineSparseDist as TrainPipelineSparseDist,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
