"""Checkpoints of models that are spread over ranks: see `save_and_load`.

Its names are imported when they are first asked for: ``torch.distributed.checkpoint`` takes a
while to import, and the errors and file names of this room need nothing of it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.distributed.checkpoint.save_and_load import (
        SavedCheckpoint,
        async_save_checkpoint,
        load_checkpoint,
        read_checkpoint,
        read_extra,
        save_checkpoint,
    )

__all__ = [
    "SavedCheckpoint",
    "async_save_checkpoint",
    "load_checkpoint",
    "read_checkpoint",
    "read_extra",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.save_and_load"), name)
