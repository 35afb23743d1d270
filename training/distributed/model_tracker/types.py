"""What a tracker of trained rows is told, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor


@dataclass
class IndexedLookup:
    """Rows that were looked up, as a store keeps them.

    Attributes:
        batch_idx: the number of the step; of rows that were put together, of the first.
        ids: ``[n]`` int64 rows among those of a shard, in the order of their lookup.
        states: ``[n, ...]``, what is kept of each; None: nothing.
        compact: whether each row is there once.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None
    compact: bool = False


@dataclass
class UniqueRows:
    """Rows that were looked up, each once.

    Attributes:
        ids: ``[n]`` int64 rows among those of a shard, ascending.
        states: ``[n, ...]``, what is kept of each; None: nothing.
    """

    ids: Tensor
    states: Tensor | None


class TrackingMode(Enum):
    """What is kept of a row that is looked up.

    ``ID_ONLY``: nothing but that it was.  ``EMBEDDING``: its vector before the first step (of unpooled
    collections).  ``MOMENTUM_LAST``: the norm of its momentum, as the last step that found it had it.
    ``ROWWISE_ADAGRAD`` and ``MOMENTUM_DIFF``: by how much Adagrad's sum of squared gradients grew.
    """

    ID_ONLY = "id_only"
    EMBEDDING = "embedding"
    MOMENTUM_LAST = "momentum_last"
    MOMENTUM_DIFF = "momentum_diff"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


class UpdateMode(Enum):
    """Which state of a row stays that was looked up several times: none is kept, the first, the last."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


class Trackers(Enum):
    """The kinds of trackers that a model may have."""

    DELTA_TRACKER = "delta_tracker"


@dataclass
class DeltaTrackerConfig:
    """Describes a `tessera.training.distributed.model_tracker.model_delta_tracker.ModelDeltaTrackerTrec`.

    Attributes:
        tracking_mode: what is kept of a row.
        consumers: names of those who ask, each of which is told all; None: one.
        delete_on_read: whether what all consumers were told is forgotten.
        auto_compact: whether rows are put together at every step; otherwise when somebody asks.
        fqns_to_skip: names of modules and tables that are not tracked, as parts of their paths.
    """

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: list[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: list[str] = field(default_factory=list)
