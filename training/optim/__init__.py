"""Optimizers that know parameters by name, and those that work in the backward pass."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.optim.clipping import (
        GradientClipping as GradientClipping,
        GradientClippingOptimizer as GradientClippingOptimizer,
    )
    from tessera.training.optim.row_updates import EmbOptimType as EmbOptimType
    from tessera.training.optim.fused import (
        EmptyFusedOptimizer as EmptyFusedOptimizer, FusedOptimizer as FusedOptimizer,
        FusedOptimizerModule as FusedOptimizerModule, FusedParams as FusedParams,
    )
    from tessera.training.optim.combined_optimizer import CombinedOptimizer as CombinedOptimizer
    from tessera.training.optim.keyed import (
        KeyedOptimizerWrapper as KeyedOptimizerWrapper, OptimizerWrapper as OptimizerWrapper,
    )
    from tessera.training.optim.keyed_optimizer import KeyedOptimizer as KeyedOptimizer
    from tessera.training.optim.optimizers import (
        Adagrad as Adagrad, Adam as Adam, LAMB as LAMB, LarsSGD as LarsSGD, Lion as Lion,
        PartialRowWiseAdam as PartialRowWiseAdam, PartialRowWiseLAMB as PartialRowWiseLAMB,
        SGD as SGD, in_backward_optimizer_filter as in_backward_optimizer_filter,
    )
    from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad
    from tessera.training.optim.warmup import (
        WarmupOptimizer as WarmupOptimizer, WarmupPolicy as WarmupPolicy,
        WarmupStage as WarmupStage,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
