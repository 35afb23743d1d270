"""The trainer: loop, evaluation, checkpoints, logs and report of one run.

`train` and `RunResult` are loaded when first asked for: the command line looks at run folders
without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.trainer.run import RunResult, train

__all__ = ["RunResult", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.run"), name)
