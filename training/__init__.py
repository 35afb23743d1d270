"""Training of recommendation models: sparse types, embedding collections, models, trainer.

The names below are found here and in their own modules; a name's module is imported when the
name is first asked for, and FBGEMM not before a fused table is built.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.distributed.collections.pooled import EmbeddingBagCollectionSharder
    from tessera.training.distributed.comm.environment import ShardingEnv
    from tessera.training.distributed.model.model_parallel import DistributedModelParallel
    from tessera.training.distributed.plan.plan_types import ShardingPlan
    from tessera.training.models.config import ModelConfig, TableConfig
    from tessera.training.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
    from tessera.training.models.ranking import RankingModel, build_ranking_model
    from tessera.training.modules.embedding_configs import (
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
    )
    from tessera.training.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingCollection,
    )
    from tessera.training.modules.tables import (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
    )
    from tessera.training.optim.fused import EmbOptimType
    from tessera.training.optim.keyed import (
        CombinedOptimizer,
        KeyedOptimizer,
        KeyedOptimizerWrapper,
    )
    from tessera.training.optim.optimizers import in_backward_optimizer_filter
    from tessera.training.sparse.jagged_tensor import (
        JaggedTensor,
        KeyedJaggedTensor,
        KeyedTensor,
    )

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "CombinedOptimizer",
    "DLRMTrain",
    "DataType",
    "DistributedModelParallel",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "ModelConfig",
    "PoolingType",
    "RankingModel",
    "ShardingEnv",
    "ShardingPlan",
    "TableConfig",
    "build_ranking_model",
    "in_backward_optimizer_filter",
]

_MODULE_OF = {
    "CombinedOptimizer": "optim.keyed",
    "DLRM": "models.dlrm",
    "DLRMTrain": "models.dlrm",
    "DLRM_DCN": "models.dlrm",
    "DataType": "modules.embedding_configs",
    "DistributedModelParallel": "distributed.model.model_parallel",
    "EmbOptimType": "optim.fused",
    "EmbeddingBagCollection": "modules.embedding_modules",
    "EmbeddingBagCollectionSharder": "distributed.collections.pooled",
    "EmbeddingBagCollectionInterface": "modules.tables",
    "EmbeddingBagConfig": "modules.embedding_configs",
    "EmbeddingCollection": "modules.embedding_modules",
    "EmbeddingCollectionInterface": "modules.tables",
    "EmbeddingConfig": "modules.embedding_configs",
    "JaggedTensor": "sparse.jagged_tensor",
    "KeyedJaggedTensor": "sparse.jagged_tensor",
    "KeyedOptimizer": "optim.keyed",
    "KeyedOptimizerWrapper": "optim.keyed",
    "KeyedTensor": "sparse.jagged_tensor",
    "ModelConfig": "models.config",
    "PoolingType": "modules.embedding_configs",
    "RankingModel": "models.ranking",
    "ShardingEnv": "distributed.comm.environment",
    "ShardingPlan": "distributed.plan.plan_types",
    "TableConfig": "models.config",
    "build_ranking_model": "models.ranking",
    "in_backward_optimizer_filter": "optim.optimizers",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
