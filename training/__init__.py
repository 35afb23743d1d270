"""Training of recommendation models: sparse types, embedding collections, models, trainer."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.fbgemm_operators import offer_operators
from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.distributed.collections.pooled import (
        EmbeddingBagCollectionSharder as EmbeddingBagCollectionSharder,
    )
    from tessera.training.distributed.comm.environment import ShardingEnv as ShardingEnv
    from tessera.training.distributed.model.model_parallel import (
        DistributedModelParallel as DistributedModelParallel,
    )
    from tessera.training.distributed.plan.plan_types import ShardingPlan as ShardingPlan
    from tessera.training.models.config import (
        ModelConfig as ModelConfig, TableConfig as TableConfig,
    )
    from tessera.training.models.dlrm import (
        DLRM as DLRM, DLRMTrain as DLRMTrain, DLRM_DCN as DLRM_DCN,
    )
    from tessera.training.models.ranking import (
        RankingModel as RankingModel, build_ranking_model as build_ranking_model,
    )
    from tessera.training.modules.embedding_configs import (
        DataType as DataType, EmbeddingBagConfig as EmbeddingBagConfig,
        EmbeddingConfig as EmbeddingConfig, PoolingType as PoolingType,
    )
    from tessera.training.modules.embedding_modules import (
        EmbeddingBagCollection as EmbeddingBagCollection,
        EmbeddingCollection as EmbeddingCollection,
    )
    from tessera.training.modules.tables import (
        EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface as EmbeddingCollectionInterface,
    )
    from tessera.training.optim.row_updates import EmbOptimType as EmbOptimType
    from tessera.training.optim.combined_optimizer import CombinedOptimizer as CombinedOptimizer
    from tessera.training.optim.keyed import KeyedOptimizerWrapper as KeyedOptimizerWrapper
    from tessera.training.optim.keyed_optimizer import KeyedOptimizer as KeyedOptimizer
    from tessera.training.optim.optimizers import (
        in_backward_optimizer_filter as in_backward_optimizer_filter,
    )
    from tessera.training.sparse.jagged_tensor import (
        JaggedTensor as JaggedTensor, KeyedJaggedTensor as KeyedJaggedTensor,
        KeyedTensor as KeyedTensor,
    )
    from tessera.training.sparse.strictness import strict as strict
    from tessera.training.streamable import (
        Multistreamable as Multistreamable, Pipelineable as Pipelineable,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
offer_operators()
