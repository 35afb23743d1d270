"""Model parallelism: tables spread over ranks and fused with their optimizer.

`docs/training.md` tells how.  The names below are found here and in their own modules; a name's
module is imported when the name is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.distributed.comm import get_local_rank, get_local_size
    from tessera.training.distributed.comm_ops import get_gradient_division, set_gradient_division
    from tessera.training.distributed.data_parallel import (
        DataParallelWrapper,
        DefaultDataParallelWrapper,
    )
    from tessera.training.distributed.embedding import (
        EmbeddingCollectionSharder,
        ShardedEmbeddingCollection,
    )
    from tessera.training.distributed.embeddingbag import (
        EmbeddingBagCollectionSharder,
        EmbeddingBagSharder,
        ShardedEmbeddingBag,
        ShardedEmbeddingBagCollection,
    )
    from tessera.training.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from tessera.training.distributed.fp_embeddingbag import (
        FeatureProcessedEmbeddingBagCollectionSharder,
        ShardedFeatureProcessedEmbeddingBagCollection,
    )
    from tessera.training.distributed.model_parallel import (
        DistributedModelParallel,
        get_module,
        get_unwrapped_module,
    )
    from tessera.training.distributed.planner import (
        EmbeddingShardingPlanner,
        ParameterConstraints,
        Topology,
    )
    from tessera.training.distributed.sharding_plan import (
        construct_module_sharding_plan,
        get_default_sharders,
    )
    from tessera.training.distributed.train_pipeline import (
        PrefetchTrainPipelineSparseDist,
        TrainPipelineBase,
        TrainPipelineSparseDist,
    )
    from tessera.training.distributed.types import (
        Awaitable,
        EmbeddingModuleShardingPlan,
        LazyAwaitable,
        LazyNoWait,
        ModuleSharder,
        NoWait,
        ParameterSharding,
        ShardedModule,
        ShardingEnv,
        ShardingPlan,
        ShardingType,
    )

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
    "Awaitable": "types",
    "CommType": "fbgemm_qcomm_codec",
    "DataParallelWrapper": "data_parallel",
    "DefaultDataParallelWrapper": "data_parallel",
    "DistributedModelParallel": "model_parallel",
    "EmbeddingBagCollectionSharder": "embeddingbag",
    "EmbeddingBagSharder": "embeddingbag",
    "EmbeddingCollectionSharder": "embedding",
    "EmbeddingModuleShardingPlan": "types",
    "EmbeddingShardingPlanner": "planner",
    "FeatureProcessedEmbeddingBagCollectionSharder": "fp_embeddingbag",
    "LazyAwaitable": "types",
    "LazyNoWait": "types",
    "ModuleSharder": "types",
    "NoWait": "types",
    "ParameterConstraints": "planner",
    "ParameterSharding": "types",
    "PrefetchTrainPipelineSparseDist": "train_pipeline",
    "QCommsConfig": "fbgemm_qcomm_codec",
    "ShardedEmbeddingBag": "embeddingbag",
    "ShardedEmbeddingBagCollection": "embeddingbag",
    "ShardedEmbeddingCollection": "embedding",
    "ShardedFeatureProcessedEmbeddingBagCollection": "fp_embeddingbag",
    "ShardedModule": "types",
    "ShardingEnv": "types",
    "ShardingPlan": "types",
    "ShardingType": "types",
    "Topology": "planner",
    "TrainPipelineBase": "train_pipeline",
    "TrainPipelineSparseDist": "train_pipeline",
    "construct_module_sharding_plan": "sharding_plan",
    "get_default_sharders": "sharding_plan",
    "get_gradient_division": "comm_ops",
    "get_local_rank": "comm",
    "get_local_size": "comm",
    "get_module": "model_parallel",
    "get_qcomm_codecs_registry": "fbgemm_qcomm_codec",
    "get_unwrapped_module": "model_parallel",
    "set_gradient_division": "comm_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
