"""What a pipeline puts in the place of sharded modules' forward passes, and what it hands to them.

The input was sent ahead; what is left is to wait for it, look up, and send the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.streams import hand_over, on_stream
from tessera.training.distributed.travel.kjt_all_to_all import KJTSplitsAllToAllMeta

if TYPE_CHECKING:
    import torch.distributed as dist

    from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
    from tessera.training.distributed.plan.sharded_module import ShardedModule
    from tessera.training.distributed.train_pipeline.tracing import ArgInfo
    from tessera.training.distributed.travel.features_awaitable import FusedKJTListSplitsAwaitable
    from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
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


TContext = TypeVar("TContext", bound=TrainPipelineContext)


class BaseForward(ABC, Generic[TContext]):
    """A forward pass whose input comes from a pipeline's context.

    Attributes:
        name: the module's path.
        args: what of the batch the module is called with.
        module: the module.
        context: the pipeline's.
        stream: the stream that the input arrives on; None on a CPU.
    """

    name: str

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule[Any, Any, Any, Any],
        context: TContext,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.name = name
        self.args = args
        self.module = module
        self.context = context
        self.stream = stream

    def start_input_dist(self, batch: Any) -> Awaitable[Any]:
        """Begin sending the module's part of ``batch``."""
        ctx = self.module.create_context()
        self.context.module_contexts_next_batch[self.name] = ctx
        positional = [info.take(batch) for info in self.args if info.name is None]
        by_name = {info.name: info.take(batch) for info in self.args if info.name is not None}
        return self.module.input_dist(ctx, *positional, **by_name)

    @property
    @abstractmethod
    def _sent(self) -> dict[str, Any]:
        """What was sent ahead, by the modules' paths."""

    @abstractmethod
    def _received(self, sent: Any) -> tuple[Any, Any]:
        """The module's input and its context."""

    def __call__(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        """Look up and send the results; the arguments were sent ahead and are not looked at."""
        del args, kwargs
        if self.name not in self._sent:
            raise UserError(
                f"module {self.name!r} was called without the pipeline that it is attached to; "
                "call the pipeline's progress(), or its detach() before the model itself"
            )
        data, ctx = self._received(self._sent.pop(self.name))
        hand_over(self.stream, data, ctx)
        return self.module.compute_and_output_dist(ctx, data)


class PipelinedForward(BaseForward[TrainPipelineContext]):
    """Waits for the input, looks up, sends the results."""

    @property
    def _sent(self) -> dict[str, Any]:
        return self.context.input_dist_tensors_requests

    def _received(self, sent: Any) -> tuple[Any, Any]:
        with on_stream(self.stream):
            data = sent.wait()
        return data, self.context.module_contexts.pop(self.name)


class PrefetchPipelinedForward(BaseForward[PrefetchTrainPipelineContext]):
    """Looks up rows that were prefetched on ``prefetch_stream``, sends the results."""

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule[Any, Any, Any, Any],
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)

    @property
    def _sent(self) -> dict[str, Any]:
        return self.context.module_input_post_prefetch

    def _received(self, sent: Any) -> tuple[Any, Any]:
        return sent, self.context.module_contexts_post_prefetch.pop(self.name)


class KJTAllToAllForward:
    """Prepares an exchange of ids without starting it, so that several start as one.

    Args:
        pg: the ranks.
        splits: features for each rank.
        stagger: see `tessera.training.distributed.dist_data.KJTAllToAll`.
    """

    def __init__(self, pg: dist.ProcessGroup, splits: list[int], stagger: int = 1) -> None:
        self._pg = pg
        self._splits = splits
        self._stagger = stagger

    def __call__(self, input: KeyedJaggedTensor) -> KJTSplitsAllToAllMeta:  # noqa: A002 - the reference's name
        """What is to be exchanged, its sizes still untold."""
        with torch.no_grad():
            return KJTSplitsAllToAllMeta.of(self._pg, input, self._splits, self._stagger)
