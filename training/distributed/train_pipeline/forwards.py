"""What a pipeline puts in the place of sharded modules' forward passes.

The input was sent ahead; what is left is to wait for it, look up, and send the results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tessera.errors import UserError
from tessera.training.distributed.train_pipeline.contexts import (
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.streams import on_stream
from tessera.training.distributed.travel.kjt_all_to_all import KJTSplitsAllToAllMeta

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
    from tessera.training.distributed.plan.sharded_module import ShardedModule
    from tessera.training.distributed.train_pipeline.tracing import ArgInfo
    from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

TContext = TypeVar("TContext", bound=TrainPipelineContext)


class BaseForward(Generic[TContext]):
    """A forward pass whose input comes from a pipeline's context.

    Args:
        name: the module's path.
        args: what of the batch the module is called with.
        module: the module.
        context: the pipeline's.
        stream: the stream that the input arrives on; None on a CPU.
    """

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule[Any, Any, Any, Any],
        context: TContext,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._name = name
        self._args = args
        self._module = module
        self._context = context
        self._stream = stream

    @property
    def name(self) -> str:
        """Return the path of the module."""
        return self._name

    @property
    def args(self) -> list[ArgInfo]:
        """Return which parts of the batch the module is called with."""
        return self._args

    @property
    def module(self) -> ShardedModule[Any, Any, Any, Any]:
        """Return the sharded module whose forward this is."""
        return self._module

    def start_input_dist(self, batch: Any) -> Awaitable[Any]:
        """Begin sending the module's part of ``batch``."""
        ctx = self._module.create_context()
        self._context.module_contexts_next_batch[self._name] = ctx
        positional = [info.take(batch) for info in self._args if info.name is None]
        by_name = {info.name: info.take(batch) for info in self._args if info.name is not None}
        return self._module.input_dist(ctx, *positional, **by_name)

    def _check_sent(self, sent: Mapping[str, Any]) -> None:
        if self._name not in sent:
            raise UserError(
                f"module {self._name!r} was called without the pipeline that it is attached to; "
                "call the pipeline's progress(), or its detach() before the model itself"
            )

    def _hand_over(self, data: Any, ctx: Any) -> None:
        """Let the current stream use what another stream made."""
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            data.record_stream(current)
            ctx.record_stream(current)


class PipelinedForward(BaseForward[TrainPipelineContext]):
    """Waits for the input, looks up, sends the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        """The arguments were sent ahead: they are not looked at."""
        del args, kwargs
        self._check_sent(self._context.input_dist_tensors_requests)
        request = self._context.input_dist_tensors_requests.pop(self._name)
        with on_stream(self._stream):
            data = request.wait()
        ctx = self._context.module_contexts.pop(self._name)
        self._hand_over(data, ctx)
        return self._module.compute_and_output_dist(ctx, data)


class PrefetchPipelinedForward(BaseForward[PrefetchTrainPipelineContext]):
    """Looks up rows that were prefetched, sends the results.

    Args:
        name: the module's path.
        args: what of the batch the module is called with.
        module: the module.
        context: the pipeline's.
        prefetch_stream: the stream that rows are prefetched on; None on a CPU.
    """

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule[Any, Any, Any, Any],
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.cuda.Stream | None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)

    def __call__(self, *args: Any, **kwargs: Any) -> LazyAwaitable[Any]:
        """The arguments were sent ahead: they are not looked at."""
        del args, kwargs
        self._check_sent(self._context.module_input_post_prefetch)
        data = self._context.module_input_post_prefetch.pop(self._name)
        ctx = self._context.module_contexts_post_prefetch.pop(self._name)
        self._hand_over(data, ctx)
        return self._module.compute_and_output_dist(ctx, data)


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
