"""Checkpoints of models that are spread over ranks."""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.distributed.checkpoint.save_and_load import (
        SavedCheckpoint as SavedCheckpoint, async_save_checkpoint as async_save_checkpoint,
        load_checkpoint as load_checkpoint, read_checkpoint as read_checkpoint,
        read_extra as read_extra, save_checkpoint as save_checkpoint,
    )

__all__, __getattr__, __dir__ = lazy_names(__name__)
