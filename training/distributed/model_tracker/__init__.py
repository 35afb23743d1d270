"""The names of ``torchrec.distributed.model_tracker``."""

# isort: skip_file
# fmt: off
from tessera.training.distributed.model_tracker.delta_store import DeltaStore as DeltaStore
from tessera.training.distributed.model_tracker.model_delta_tracker import (
    SUPPORTED_MODULES as SUPPORTED_MODULES, ModelDeltaTracker as ModelDeltaTracker,
)
from tessera.training.distributed.model_tracker.types import (
    IndexedLookup as IndexedLookup, TrackingMode as TrackingMode, Trackers as Trackers,
    UniqueRows as UniqueRows, UpdateMode as UpdateMode,
)
