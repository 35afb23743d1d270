"""What the stages of a pipeline hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.travel.features_awaitable import FusedKJTListSplitsAwaitable
from tessera.training.streamable import Multistreamable


@dataclass
class TrainPipelineContext:
    """Holds the input of sharded modules that is being sent, by the modules' paths in the model.

    A batch's input is first in ``input_dist_splits_requests``: the ranks tell each other how much
    they will send.  Then it is in ``input_dist_tensors_requests``: the ids travel.  The forward
    pass takes it out.

    Attributes:
        input_dist_splits_requests: first waits, of the next batch.
        input_dist_tensors_requests: second waits.
        module_contexts: the modules' contexts of the batch in ``input_dist_tensors_requests``.
        module_contexts_next_batch: those of the batch in ``input_dist_splits_requests``.
        fused_splits_awaitables: sizes of several modules in one exchange, with the modules' paths.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, Multistreamable] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], FusedKJTListSplitsAwaitable[Any]]] = field(
        default_factory=list
    )


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """The same, and input whose rows are being brought into the device's cache.

    Attributes:
        module_input_post_prefetch: input that arrived and was prefetched for.
        module_contexts_post_prefetch: the modules' contexts of that batch.
    """

    module_input_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)
