"""What a pipeline puts in the place of sharded modules' forward passes.

The input was sent ahead; what is left is to wait for it, look up, and send the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic

import torch

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.contexts import (
    PrefetchTrainPipelineContext,
    TContext,
    TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.streams import hand_over, on_stream
from tessera.training.distributed.travel.kjt_all_to_all import KJTSplitsAllToAllMeta

if TYPE_CHECKING:
    import torch.distributed as dist

    from tessera.training.distributed.comm.awaitable import Awaitable
    from tessera.training.distributed.plan.sharded_module import ShardedModule
    from tessera.training.distributed.train_pipeline.arguments import CallArgs
    from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class BaseForward(ABC, Generic[TContext]):
    """A forward pass whose input comes from a batch's context.

    Attributes:
        name: the module's path.
        args: what of the batch the module is called with.
        module: the module.
        context: the context of the batch whose forward pass is next.
        stream: the stream that the input arrives on; None on a CPU.
    """

    name: str

    def __init__(
        self,
        name: str,
        args: CallArgs,
        module: ShardedModule[Any, Any, Any, Any],
        context: TContext,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.name = name
        self.args = args
        self.module = module
        self.context = context
        self.stream = stream

    def set_context(self, context: TContext) -> None:
        """Take the input of the next forward pass from ``context``."""
        self.context = context

    def get_context(self) -> TContext:
        """Return the context of the batch whose forward pass is next."""
        return self.context

    def start_input_dist(self, batch: Any, context: TContext) -> Awaitable[Any]:
        """Begin sending the module's part of ``batch``, whose context is ``context``."""
        ctx = self.module.create_context()
        context.module_contexts[self.name] = ctx
        positional, by_name = self.args.build_args_kwargs(batch)
        return self.module.input_dist(ctx, *positional, **by_name)

    def arrived(self, context: TContext, stream: torch.cuda.Stream | None) -> tuple[Any, Any]:
        """Take the module's input and its own context out of ``context``; the input arrives on ``stream``."""
        with on_stream(stream):
            data = context.input_dist_tensors_requests.pop(self.name).wait()
        return data, context.module_contexts.pop(self.name)

    @property
    @abstractmethod
    def _sent(self) -> dict[str, Any]:
        """What was sent ahead, by the modules' paths."""

    @abstractmethod
    def _result(self) -> Any:
        """The module's result for what was sent ahead."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Look up and send the results; the arguments were sent ahead and are not looked at."""
        del args, kwargs
        if self.name not in self._sent:
            raise UserError(
                f"module {self.name!r} was called without the pipeline that it is attached to; "
                "call the pipeline's progress(), or its detach() before the model itself"
            )
        return self._result()


class PipelinedForward(BaseForward[TrainPipelineContext]):
    """Waits for the input, looks up, sends the results."""

    @property
    def _sent(self) -> dict[str, Any]:
        return self.context.input_dist_tensors_requests

    def _result(self) -> Any:
        data, ctx = self.arrived(self.context, self.stream)
        hand_over(self.stream, data, ctx)
        return self.module.compute_and_output_dist(ctx, data)


class PrefetchPipelinedForward(BaseForward[PrefetchTrainPipelineContext]):
    """Looks up rows that were prefetched on ``prefetch_stream``, sends the results."""

    def __init__(
        self,
        name: str,
        args: CallArgs,
        module: ShardedModule[Any, Any, Any, Any],
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)

    @property
    def _sent(self) -> dict[str, Any]:
        return self.context.module_input_post_prefetch

    def _result(self) -> Any:
        data = self.context.module_input_post_prefetch.pop(self.name)
        ctx = self.context.module_contexts_post_prefetch.pop(self.name)
        hand_over(self.stream, data, ctx)
        return self.module.compute_and_output_dist(ctx, data)


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
