"""A model whose sharded modules take their input from a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.model.model_parallel import get_unwrapped_module
from tessera.training.distributed.train_pipeline.contexts import TrainPipelineContext
from tessera.training.distributed.train_pipeline.forwards import BaseForward, KJTAllToAllForward
from tessera.training.distributed.train_pipeline.postproc import use_context_for_postprocs
from tessera.training.distributed.train_pipeline.streams import follow_current, on_stream
from tessera.training.distributed.train_pipeline.tracing import (
    pipelineable_modules,
    plain_modules,
    trace,
)
from tessera.training.distributed.travel.features_awaitable import (
    FusedKJTListSplitsAwaitable,
    KJTListSplitsAwaitable,
)
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAll


class AttachedModel:
    """Puts pipelined forward passes into a model, runs their first stages, and takes them out again.

    Every rank runs the same collectives in the same order, because every rank has the same modules in
    the same order.

    Args:
        model: its forward pass takes a batch, and can be traced by ``torch.fx`` with sharded modules
            and modules without them as single steps.
        forward_type: what takes the place of the sharded modules' forward passes.
        context: of the batch whose forward pass is next.
        dist_stream: the stream that ids are sent on; None on a CPU.
        input_stream: the stream that a forward pass's input is ready on; None on a CPU.
        pipeline_postproc: whether modules without trainable parameters run ahead on the batch, see
            `tessera.training.distributed.train_pipeline.postproc`.
        apply_jit: script the modules that hold no sharded ones.

    Raises:
        UserError: the model cannot be traced, or a module cannot be scripted.
    """

    def __init__(
        self,
        model: nn.Module,
        forward_type: type[BaseForward[Any]],
        context: TrainPipelineContext,
        *,
        dist_stream: torch.cuda.Stream | None,
        input_stream: torch.cuda.Stream | None,
        pipeline_postproc: bool,
        apply_jit: bool,
    ) -> None:
        # The model was made, or changed, on the current stream; others would read its tables too early.
        follow_current(dist_stream, input_stream)
        inner = get_unwrapped_module(model)
        found = pipelineable_modules(inner, trace(inner), pipeline_postproc=pipeline_postproc)
        self._dist_stream = dist_stream
        self.postprocs = found.postprocs
        self.forwards: list[Any] = []
        for path, module, args in found.modules:
            forward = forward_type(path, args, module, context, input_stream)
            # Set on the instance: nn.Module.__call__ finds it before the class's.
            module.forward = forward  # type: ignore[method-assign]
            self.forwards.append(forward)
        for postproc in self.postprocs:
            postproc.attach(context, dist_stream)
        if apply_jit:
            _script_plain_modules(inner, {postproc.fqn for postproc in self.postprocs})

    def detach(self) -> None:
        """Give the modules their own forward passes back."""
        for forward in self.forwards:
            del forward.module.forward
        for postproc in self.postprocs:
            postproc.detach()

    def set_context(self, context: TrainPipelineContext) -> None:
        """Let the next forward pass take its input from ``context``."""
        for forward in self.forwards:
            forward.set_context(context)
        for postproc in self.postprocs:
            postproc.set_context(context)

    def start_dist(self, batch: Any, context: TrainPipelineContext) -> None:
        """Tell the other ranks how many ids of ``batch`` they will get; on the current stream.

        Does nothing for a batch whose ids have begun to travel.
        """
        if context.is_started:
            return
        requests = {}
        with use_context_for_postprocs(self.postprocs, context), _Unstarted(self.forwards):
            for forward in self.forwards:
                requests[forward.name] = forward.start_input_dist(batch, context)
        context.fused_splits_awaitables = _fuse_splits(requests, context)
        context.input_dist_splits_requests = requests

    def wait_dist(self, context: TrainPipelineContext) -> None:
        """Wait for the sizes, and let the ids travel."""
        arriving = context.input_dist_tensors_requests
        with on_stream(self._dist_stream):
            for names, awaitable in context.fused_splits_awaitables:
                arriving.update(zip(names, awaitable.wait(), strict=True))
            for name, request in context.input_dist_splits_requests.items():
                arriving[name] = request.wait()
        context.fused_splits_awaitables = []
        context.input_dist_splits_requests = {}


class _Unstarted:
    """While it is entered, the modules' exchanges of ids are prepared and not started."""

    def __init__(self, forwards: list[Any]) -> None:
        self._exchanges = [
            part
            for forward in forwards
            for dist in getattr(forward.module, "_input_dists", [])
            for part in dist.modules()
            if isinstance(part, KJTAllToAll)
        ]

    def __enter__(self) -> None:
        for exchange in self._exchanges:
            exchange.forward = KJTAllToAllForward(  # type: ignore[method-assign,assignment]
                exchange.pg, exchange.splits, exchange.stagger
            )

    def __exit__(self, *exception: object) -> None:
        for exchange in self._exchanges:
            del exchange.forward


def _fuse_splits(
    requests: dict[str, Any], context: TrainPipelineContext
) -> list[tuple[list[str], FusedKJTListSplitsAwaitable[Any]]]:
    """One exchange of sizes per process group; takes the requests that it covers."""
    by_group: dict[Any, dict[str, KJTListSplitsAwaitable[Any]]] = {}
    for name, request in list(requests.items()):
        if isinstance(request, KJTListSplitsAwaitable):
            del requests[name]
            by_group.setdefault(request.process_group, {})[name] = request
    fused = []
    for group, covered in by_group.items():
        contexts = [context.module_contexts[name] for name in covered]
        sizes = FusedKJTListSplitsAwaitable(list(covered.values()), contexts, group)
        fused.append((list(covered), sizes))
    return fused


def _script_plain_modules(model: nn.Module, kept: set[str]) -> None:
    """Replace the outermost modules that hold no sharded ones by their scripted forms, except ``kept``."""
    for path in plain_modules(model):
        child = model.get_submodule(path)
        if isinstance(child, torch.jit.ScriptModule) or path in kept:
            continue
        try:
            scripted = torch.jit.script(child)
        except Exception as error:
            raise UserError(
                f"apply_jit: module {path!r} ({type(child).__name__}) cannot be scripted: {error}; "
                "leave apply_jit out"
            ) from error
        model.set_submodule(path, scripted)
