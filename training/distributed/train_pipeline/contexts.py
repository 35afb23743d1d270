"""What a pipeline keeps of one batch while its stages run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from tessera.training.distributed.comm.awaitable import Awaitable
    from tessera.training.distributed.travel.features_awaitable import FusedKJTListSplitsAwaitable
    from tessera.training.streamable import Multistreamable


@dataclass
class TrainPipelineContext:
    """Holds the input of sharded modules that is being sent, by the modules' paths in the model.

    Each batch in a pipeline has a context of its own.  Its input is first in
    ``input_dist_splits_requests`` or ``fused_splits_awaitables``: the ranks tell each other how much
    they will send.  Then it is in ``input_dist_tensors_requests``: the ids travel.  The forward
    pass takes it out.

    Attributes:
        input_dist_splits_requests: first waits.
        input_dist_tensors_requests: second waits.
        module_contexts: the modules' own contexts.
        module_contexts_next_batch: stays empty; TorchRec once kept two batches in one context.
        fused_splits_awaitables: sizes of several modules in one exchange, with the modules' paths.
        postproc_fwd_results: what modules gave that ran on the batch ahead of the forward pass.
        index: how many batches the pipeline took before this one.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, Multistreamable] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], FusedKJTListSplitsAwaitable[Any]]] = field(
        default_factory=list
    )
    postproc_fwd_results: dict[str, Any] = field(default_factory=dict, kw_only=True)
    index: int | None = field(default=None, kw_only=True)

    @property
    def is_started(self) -> bool:
        """Whether the batch's input has begun to travel, and no forward pass took it yet."""
        return bool(self.module_contexts)


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """The same, and input whose rows are being brought into the device's cache.

    Attributes:
        module_input_post_prefetch: input that arrived and was prefetched for.
        module_contexts_post_prefetch: the modules' contexts of that input.
    """

    module_input_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)


@dataclass
class EmbeddingTrainPipelineContext(TrainPipelineContext):
    """The same, and vectors that were looked up ahead of the forward pass.

    Attributes:
        embedding_a2a_requests: waits for the vectors, by the modules' paths.
        embedding_tensors: per module call the tensors of vectors, which the tables' backward passes follow.
        embedding_features: the features of each of those tensors.
        detached_embedding_tensors: what the model got in their place; their gradients are kept until
            the tables' backward passes.
    """

    embedding_a2a_requests: dict[str, Any] = field(default_factory=dict)
    embedding_tensors: list[list[Tensor]] = field(default_factory=list)
    embedding_features: list[list[str | list[str]]] = field(default_factory=list)
    detached_embedding_tensors: list[list[Tensor]] = field(default_factory=list)


TContext = TypeVar("TContext", bound=TrainPipelineContext)
