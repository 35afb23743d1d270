"""Model parallelism: tables spread over ranks and fused with their optimizer.

`docs/training.md` tells how.  The names below are found here and in their own modules; a name's
module is imported when the name is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.distributed.collections.feature_processed import (
        FeatureProcessedEmbeddingBagCollectionSharder,
        ShardedFeatureProcessedEmbeddingBagCollection,
    )
    from tessera.training.distributed.collections.pooled import (
        EmbeddingBagCollectionSharder,
        ShardedEmbeddingBagCollection,
    )
    from tessera.training.distributed.collections.single_bag import (
        EmbeddingBagSharder,
        ShardedEmbeddingBag,
    )
    from tessera.training.distributed.collections.unpooled import (
        EmbeddingCollectionSharder,
        ShardedEmbeddingCollection,
    )
    from tessera.training.distributed.comm.awaitable import (
        Awaitable,
        LazyAwaitable,
        LazyNoWait,
        NoWait,
    )
    from tessera.training.distributed.comm.codecs import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from tessera.training.distributed.comm.environment import ShardingEnv
    from tessera.training.distributed.comm.nodes import get_local_rank, get_local_size
    from tessera.training.distributed.comm.request import (
        get_gradient_division,
        set_gradient_division,
    )
    from tessera.training.distributed.model.data_parallel import (
        DataParallelWrapper,
        DefaultDataParallelWrapper,
    )
    from tessera.training.distributed.model.model_parallel import (
        DistributedModelParallel,
        get_module,
        get_unwrapped_module,
    )
    from tessera.training.distributed.plan.plan_types import (
        EmbeddingModuleShardingPlan,
        ParameterSharding,
        ShardingPlan,
        ShardingType,
    )
    from tessera.training.distributed.plan.sharded_module import ModuleSharder, ShardedModule
    from tessera.training.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from tessera.training.distributed.planner.generators import (
        construct_module_sharding_plan,
        get_default_sharders,
    )
    from tessera.training.distributed.train_pipeline.pipelines import TrainPipelineBase
    from tessera.training.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist
    from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist

__all__ = [
    "Awaitable",
    "CommType",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingModuleShardingPlan",
    "EmbeddingShardingPlanner",
    "FeatureProcessedEmbeddingBagCollectionSharder",
    "LazyAwaitable",
    "LazyNoWait",
    "ModuleSharder",
    "NoWait",
    "ParameterConstraints",
    "ParameterSharding",
    "PrefetchTrainPipelineSparseDist",
    "QCommsConfig",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedFeatureProcessedEmbeddingBagCollection",
    "ShardedModule",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "Topology",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "construct_module_sharding_plan",
    "get_default_sharders",
    "get_gradient_division",
    "get_local_rank",
    "get_local_size",
    "get_module",
    "get_qcomm_codecs_registry",
    "get_unwrapped_module",
    "set_gradient_division",
]

_MODULE_OF = {
    "Awaitable": "comm.awaitable",
    "CommType": "comm.codecs",
    "DataParallelWrapper": "model.data_parallel",
    "DefaultDataParallelWrapper": "model.data_parallel",
    "DistributedModelParallel": "model.model_parallel",
    "EmbeddingBagCollectionSharder": "collections.pooled",
    "EmbeddingBagSharder": "collections.single_bag",
    "EmbeddingCollectionSharder": "collections.unpooled",
    "EmbeddingModuleShardingPlan": "plan.plan_types",
    "EmbeddingShardingPlanner": "planner",
    "FeatureProcessedEmbeddingBagCollectionSharder": "collections.feature_processed",
    "LazyAwaitable": "comm.awaitable",
    "LazyNoWait": "comm.awaitable",
    "ModuleSharder": "plan.sharded_module",
    "NoWait": "comm.awaitable",
    "ParameterConstraints": "planner",
    "ParameterSharding": "plan.plan_types",
    "PrefetchTrainPipelineSparseDist": "train_pipeline.prefetch",
    "QCommsConfig": "comm.codecs",
    "ShardedEmbeddingBag": "collections.single_bag",
    "ShardedEmbeddingBagCollection": "collections.pooled",
    "ShardedEmbeddingCollection": "collections.unpooled",
    "ShardedFeatureProcessedEmbeddingBagCollection": "collections.feature_processed",
    "ShardedModule": "plan.sharded_module",
    "ShardingEnv": "comm.environment",
    "ShardingPlan": "plan.plan_types",
    "ShardingType": "plan.plan_types",
    "Topology": "planner",
    "TrainPipelineBase": "train_pipeline.pipelines",
    "TrainPipelineSparseDist": "train_pipeline.sparse_dist",
    "construct_module_sharding_plan": "planner.generators",
    "get_default_sharders": "planner.generators",
    "get_gradient_division": "comm.request",
    "get_local_rank": "comm.nodes",
    "get_local_size": "comm.nodes",
    "get_module": "model.model_parallel",
    "get_qcomm_codecs_registry": "comm.codecs",
    "get_unwrapped_module": "model.model_parallel",
    "set_gradient_division": "comm.request",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
