"""The pipeline that sends the ids of the next batch during the current batch's work.

While batch ``i`` runs forward and backward, batch ``i + 1`` travels and batch ``i + 2`` is copied:

====================  ============================  ==========================================
stream                before forward ``i``          between forward and backward ``i``
====================  ============================  ==========================================
copies                batch ``i + 2`` to the device
ids                   sizes of batch ``i + 1``      ids of batch ``i + 1``
default               forward ``i``                 backward ``i``, step
====================  ============================  ==========================================

Every rank runs the same collectives in the same order, because every rank has the same modules in
the same order; every rank must also have the same number of batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.errors import UserError
from tessera.training.distributed.model.model_parallel import get_unwrapped_module
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward,
    KJTAllToAllForward,
    PipelinedForward,
    TrainPipelineContext,
)
from tessera.training.distributed.train_pipeline.pipelines import In, Out, TrainPipelineBase
from tessera.training.distributed.train_pipeline.streams import (
    hand_over,
    make_stream,
    on_stream,
)
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


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """Overlaps copies and the travel of ids with forward and backward passes.

    The first call of `progress` puts pipelined forward passes into the model's sharded modules;
    `detach` takes them out again.

    Args:
        model: its forward pass takes a batch, returns (losses, output), and can be traced by
            ``torch.fx`` with sharded modules and modules without them as single steps.
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        execute_all_batches: whether the batches in the pipeline are still trained on when the
            iterator has ended; otherwise they are kept for the next iterator.
        apply_jit: script the modules that hold no sharded ones.
    """

    _copy_priority = -1

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        apply_jit: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__(model, optimizer, device)
        self._execute_all_batches = execute_all_batches
        self._apply_jit = apply_jit
        self._data_dist_stream = make_stream(device, priority=-1)
        self._context = self._make_context()
        self._forwards: list[BaseForward[Any]] | None = None

    def _make_context(self) -> TrainPipelineContext:
        return TrainPipelineContext()

    def _make_forward(self, path: str, args: Any, module: Any) -> BaseForward[Any]:
        return PipelinedForward(path, args, module, self._context, self._data_dist_stream)

    # The model

    def _attach(self) -> list[BaseForward[Any]]:
        model = get_unwrapped_module(self._model)
        forwards = []
        for path, module, args in pipelineable_modules(model, trace(model)):
            forward = self._make_forward(path, args, module)
            # Set on the instance: nn.Module.__call__ finds it before the class's.
            module.forward = forward  # type: ignore[method-assign]
            forwards.append(forward)
        if self._apply_jit:
            _script_plain_modules(model)
        return forwards

    def detach(self) -> nn.Module:
        """Give the model its own forward passes back.

        Raises:
            UserError: batches are still in the pipeline.
        """
        if self._batches:
            raise UserError(
                f"{len(self._batches)} batches are in the pipeline; call progress until it raises "
                "StopIteration"
            )
        for forward in self._forwards or []:
            del forward.module.forward
        self._forwards = None
        return self._model

    # The stages

    def _start_sparse_data_dist(self, batch: Any) -> None:
        """Tell the other ranks how many ids they will get."""
        assert self._forwards is not None
        context = self._context
        with on_stream(self._data_dist_stream):
            hand_over(self._memcpy_stream, batch)
            with _Unstarted(self._forwards):
                for forward in self._forwards:
                    request = forward.start_input_dist(batch)
                    context.input_dist_splits_requests[forward.name] = request
            context.fused_splits_awaitables = _fuse_splits(context)

    def _wait_sparse_data_dist(self) -> None:
        """Wait for the sizes, and let the ids travel."""
        context = self._context
        with on_stream(self._data_dist_stream):
            for names, awaitable in context.fused_splits_awaitables:
                context.input_dist_tensors_requests.update(
                    zip(names, awaitable.wait(), strict=True)
                )
            for name, request in context.input_dist_splits_requests.items():
                context.input_dist_tensors_requests[name] = request.wait()
        context.fused_splits_awaitables = []
        context.input_dist_splits_requests = {}
        context.module_contexts.update(context.module_contexts_next_batch)
        context.module_contexts_next_batch = {}

    def _fill(self, dataloader_iter: Iterator[In]) -> bool:
        """Have two batches in the pipeline, the first one on its way."""
        if self._forwards is None:
            self._forwards = self._attach()
        if not self._batches and self._enqueue(dataloader_iter):
            self._send(0)
        if len(self._batches) == 1:
            self._enqueue(dataloader_iter)
        return self._has_work

    @property
    def _has_work(self) -> bool:
        return bool(self._batches) and (self._execute_all_batches or not self._source.exhausted)

    def _send(self, place: int) -> None:
        """Let a batch travel, without anything beside it."""
        self._start_sparse_data_dist(self._batches[place])
        self._wait_sparse_data_dist()

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        """The forward pass of the first batch, while the next one's ids travel."""
        hand_over(self._data_dist_stream, self._batches[0])
        has_next = len(self._batches) > 1
        if has_next:
            self._start_sparse_data_dist(self._batches[1])
        self._enqueue(dataloader_iter)
        losses, output = self._model(self._batches[0])
        if has_next:
            self._wait_sparse_data_dist()
        return losses, output


class _Unstarted:
    """While it is entered, the modules' exchanges of ids are prepared and not started."""

    def __init__(self, forwards: list[BaseForward[Any]]) -> None:
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
    context: TrainPipelineContext,
) -> list[tuple[list[str], FusedKJTListSplitsAwaitable[Any]]]:
    """One exchange of sizes per process group; takes the requests that it covers."""
    by_group: dict[Any, dict[str, KJTListSplitsAwaitable[Any]]] = {}
    for name, request in list(context.input_dist_splits_requests.items()):
        if isinstance(request, KJTListSplitsAwaitable):
            del context.input_dist_splits_requests[name]
            by_group.setdefault(request.process_group, {})[name] = request
    fused = []
    for group, requests in by_group.items():
        contexts = [context.module_contexts_next_batch[name] for name in requests]
        sizes = FusedKJTListSplitsAwaitable(list(requests.values()), contexts, group)
        fused.append((list(requests), sizes))
    return fused


def _script_plain_modules(model: nn.Module) -> None:
    """Replace the outermost modules that hold no sharded ones by their scripted forms."""
    for path in plain_modules(model):
        child = model.get_submodule(path)
        if isinstance(child, torch.jit.ScriptModule):
            continue
        try:
            scripted = torch.jit.script(child)
        except Exception as error:
            raise UserError(
                f"apply_jit: module {path!r} ({type(child).__name__}) cannot be scripted: {error}; "
                "leave apply_jit out"
            ) from error
        model.set_submodule(path, scripted)
