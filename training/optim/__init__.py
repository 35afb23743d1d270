"""Optimizers that know parameters by name, and the ones that live inside a backward pass.

The names below are found here and in their own modules; a name's module is imported when the
name is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # apply_optimizer_in_backward is a module here too; the function is the one in it.
    from tessera.training.optim.clipping import GradientClipping, GradientClippingOptimizer
    from tessera.training.optim.fused import (
        EmbOptimType,
        EmptyFusedOptimizer,
        FusedOptimizer,
        FusedOptimizerModule,
        FusedParams,
    )
    from tessera.training.optim.keyed import (
        CombinedOptimizer,
        KeyedOptimizer,
        KeyedOptimizerWrapper,
        OptimizerWrapper,
    )
    from tessera.training.optim.optimizers import (
        LAMB,
        SGD,
        Adagrad,
        Adam,
        LarsSGD,
        Lion,
        PartialRowWiseAdam,
        PartialRowWiseLAMB,
        in_backward_optimizer_filter,
    )
    from tessera.training.optim.rowwise_adagrad import RowWiseAdagrad
    from tessera.training.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "EmbOptimType",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "FusedParams",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "Lion",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "in_backward_optimizer_filter",
]

_MODULES = {
    "clipping": ("GradientClipping", "GradientClippingOptimizer"),
    "fused": (
        "EmbOptimType",
        "EmptyFusedOptimizer",
        "FusedOptimizer",
        "FusedOptimizerModule",
        "FusedParams",
    ),
    "keyed": ("CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper"),
    "optimizers": (
        "LAMB",
        "SGD",
        "Adagrad",
        "Adam",
        "LarsSGD",
        "Lion",
        "PartialRowWiseAdam",
        "PartialRowWiseLAMB",
        "in_backward_optimizer_filter",
    ),
    "rowwise_adagrad": ("RowWiseAdagrad",),
    "warmup": ("WarmupOptimizer", "WarmupPolicy", "WarmupStage"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
