"""From files on disk to batches: readers, the prepared cache, splits, the loader, datagen.

`open_data` is the door.  Processes that only parse or generate text never load torch.
"""

# isort: skip_file
# fmt: off
from typing import TYPE_CHECKING

from tessera.training.lazy_names import lazy_names

if TYPE_CHECKING:
    from tessera.training.data.batch import Batch as Batch
    from tessera.training.data.config import DataConfig as DataConfig
    from tessera.training.data.dataset import (
        Dataset as Dataset, DatasetView as DatasetView, DataSplits as DataSplits,
    )
    from tessera.training.data.loader import BatchLoader as BatchLoader
    from tessera.training.data.malformed import (
        MalformedReport as MalformedReport, MalformedRowError as MalformedRowError,
    )
    from tessera.training.data.opening import open_data as open_data

__all__, __getattr__, __dir__ = lazy_names(__name__)
