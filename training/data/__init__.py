"""From files on disk to batches: readers, the prepared cache, splits, the loader, datagen.

`open_data` is the door.  The names below are imported when they are first asked for, so that the
processes that only parse or generate text never load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera.training.data.batch import Batch
    from tessera.training.data.config import DataConfig
    from tessera.training.data.dataset import Dataset, DatasetView, DataSplits
    from tessera.training.data.loader import BatchLoader
    from tessera.training.data.malformed import MalformedReport, MalformedRowError
    from tessera.training.data.opening import open_data

_HOMES = {
    "Batch": "batch",
    "BatchLoader": "loader",
    "DataConfig": "config",
    "DataSplits": "dataset",
    "Dataset": "dataset",
    "DatasetView": "dataset",
    "MalformedReport": "malformed",
    "MalformedRowError": "malformed",
    "open_data": "opening",
}

__all__ = [
    "Batch",
    "BatchLoader",
    "DataConfig",
    "DataSplits",
    "Dataset",
    "DatasetView",
    "MalformedReport",
    "MalformedRowError",
    "open_data",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
