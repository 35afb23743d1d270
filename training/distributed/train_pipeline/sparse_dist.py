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

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.errors import UserError
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.distributed.train_pipeline.attached import AttachedModel
from tessera.training.distributed.train_pipeline.contexts import TrainPipelineContext
from tessera.training.distributed.train_pipeline.forwards import BaseForward, PipelinedForward
from tessera.training.distributed.train_pipeline.pipelines import In, Out, TrainPipelineBase
from tessera.training.distributed.train_pipeline.streams import (
    hand_over,
    make_stream,
    on_stream,
    to_device,
)


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """Overlaps copies and the travel of ids with forward and backward passes.

    The first call of `progress` puts pipelined forward passes into the model's sharded modules;
    `detach` takes them out again.  The stages of a step are methods of their own, for pipelines that
    put them in another order.

    Args:
        model: its forward pass takes a batch, returns (losses, output), and can be traced by
            ``torch.fx`` with sharded modules and modules without them as single steps.
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        execute_all_batches: whether the batches in the pipeline are still trained on when the
            iterator has ended; otherwise they are kept for the next iterator.
        apply_jit: script the modules that hold no sharded ones.
        context_type: the class of the batches' contexts.
        pipeline_postproc: whether modules without trainable parameters, which change the ids on the
            way to a sharded module, run ahead when the ids are sent.  Without it the ids that such a
            module gives are sent in the forward pass.
        custom_model_fwd: called with the batch in the model's place; returns (losses, output).  It
            calls the model's sharded modules, each once.
        dmp_collection_sync_interval_batches: batches between two calls of the model's ``sync``, where
            it is a `DistributedModelParallel` that has one; None: never.
        enqueue_batch_after_forward: take the batch after next after the forward pass, so that its copy
            does not compete with lookups in host memory.
    """

    _copy_priority = -1
    _pipelined_forward_type: ClassVar[type[BaseForward[Any]]] = PipelinedForward

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, custom_model_fwd)
        interval = dmp_collection_sync_interval_batches
        if interval is not None and interval < 1:
            raise UserError(
                f"dmp_collection_sync_interval_batches={interval}: must be at least 1, or None"
            )
        self._calls_model = custom_model_fwd is None
        self._execute_all_batches = execute_all_batches
        self._apply_jit = apply_jit
        self._context_type = context_type
        self._pipeline_postproc = pipeline_postproc
        self._sync_interval = interval
        self._enqueue_batch_after_forward = enqueue_batch_after_forward
        self._data_dist_stream = make_stream(device, priority=-1)
        self.contexts: deque[Any] = deque()
        self._taken = 0
        self._attached: AttachedModel | None = None

    # The model

    @property
    def _input_stream(self) -> torch.cuda.Stream | None:
        """The stream that the input of pipelined forward passes is ready on."""
        return self._data_dist_stream

    def attach(self, model: nn.Module | None = None) -> None:
        """Put pipelined forward passes into the model; `progress` does so by itself.

        Args:
            model: takes the place of the pipeline's model, for the batches in the pipeline too: its
                sharded modules must have the same paths and plan.

        Raises:
            UserError: the model cannot be traced.
        """
        if model is not None and model is not self._model:
            self.detach()
            self._model = model
            if self._calls_model:
                self._model_fwd = model
        if self._attached is None:
            context = self.contexts[0] if self.contexts else self._context_type()
            self._attached = AttachedModel(
                self._model,
                self._pipelined_forward_type,
                context,
                dist_stream=self._data_dist_stream,
                input_stream=self._input_stream,
                pipeline_postproc=self._pipeline_postproc,
                apply_jit=self._apply_jit,
            )

    def detach(self) -> nn.Module:
        """Give the model its own forward passes back, and return it.

        Batches in the pipeline stay there; the next call of `progress` attaches the model again and
        goes on with them.
        """
        if self._attached is not None:
            self._attached.detach()
            self._attached = None
        return self._model

    @property
    def _modules(self) -> AttachedModel:
        if self._attached is None:
            self.attach()
        assert self._attached is not None
        return self._attached

    def sync_embeddings(
        self,
        model: nn.Module,
        interval_batches: int | None,
        context: TrainPipelineContext | None = None,
    ) -> None:
        """Make copies of sharded tables equal, once in so many batches.

        Args:
            model: a `DistributedModelParallel` with a method ``sync``; nothing is done for others.
            interval_batches: batches from one call to the next; None: never.
            context: of the batch that was just trained on.
        """
        sync = getattr(model, "sync", None) if isinstance(model, DistributedModelParallel) else None
        if sync is None or interval_batches is None or context is None:
            return
        if (context.index or 0) % interval_batches == 0:
            sync()

    # The stages

    def copy_batch_to_gpu(
        self, dataloader_iter: Iterator[In]
    ) -> tuple[Any | None, TrainPipelineContext | None]:
        """The next batch on the device, and a context for it; None and None: none is left."""
        batch = self._source.next(dataloader_iter)
        if batch is None:
            return None, None
        with on_stream(self._memcpy_stream):
            on_device = to_device(batch, self._device)
        context = self._context_type(index=self._taken)
        self._taken += 1
        return on_device, context

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one more batch to the device, with a context of its own; False: none is left."""
        batch, context = self.copy_batch_to_gpu(dataloader_iter)
        if batch is None:
            return False
        self.batches.append(batch)
        self.contexts.append(context)
        return True

    def dequeue_batch(self) -> None:
        """Forget the batch that was worked on; the next forward pass takes the next one's input."""
        self.batches.popleft()
        self.contexts.popleft()
        if self.contexts:
            self._modules.set_context(self.contexts[0])

    def start_sparse_data_dist(self, batch: Any, context: TrainPipelineContext) -> None:
        """Tell the other ranks how many ids they will get."""
        with on_stream(self._data_dist_stream):
            hand_over(self._memcpy_stream, batch)
            self._modules.start_dist(batch, context)

    def wait_sparse_data_dist(self, context: TrainPipelineContext) -> None:
        """Wait for the sizes, and let the ids travel."""
        self._modules.wait_dist(context)

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have two batches in the pipeline, the first one on its way."""
        if not self.batches and self.enqueue_batch(dataloader_iter):
            self._send(0)
        if len(self.batches) == 1:
            self.enqueue_batch(dataloader_iter)

    def reset(self) -> None:
        """Forget the batches in the pipeline and the iterator; on all ranks alike."""
        super().reset()
        self.contexts.clear()
        self._taken = 0

    @property
    def _has_work(self) -> bool:
        return bool(self.batches) and (self._execute_all_batches or not self._source.exhausted)

    def _send(self, place: int) -> None:
        """Let a batch travel, without anything beside it; make it the next one if it is the first."""
        if place == 0:
            self._modules.set_context(self.contexts[0])
        self.start_sparse_data_dist(self.batches[place], self.contexts[place])
        self.wait_sparse_data_dist(self.contexts[place])

    def _wait_for_batch(self) -> None:
        hand_over(self._data_dist_stream, self.batches[0])

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        """The forward pass of the first batch, while the next one's ids travel."""
        self._modules.set_context(self.contexts[0])
        has_next = len(self.batches) > 1
        if has_next:
            self.start_sparse_data_dist(self.batches[1], self.contexts[1])
        if not self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        losses, output = self._model_fwd(self.batches[0])
        if self._enqueue_batch_after_forward:
            self.enqueue_batch(dataloader_iter)
        if has_next:
            self.wait_sparse_data_dist(self.contexts[1])
        return losses, output

    def _backward(self, losses: Tensor) -> None:
        super()._backward(losses)
        self.sync_embeddings(self._model, self._sync_interval, self.contexts[0])


class TrainPipelineSparseDistLite(TrainPipelineSparseDist[In, Out]):
    """Copies the next batch during a step, and sends the ids of the current one at the step's beginning.

    It keeps a batch less on the device than `TrainPipelineSparseDist`, and the travel of ids overlaps
    with nothing.

    Args:
        model: see `TrainPipelineSparseDist`.
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        apply_jit: see `TrainPipelineSparseDist`.
        context_type: see `TrainPipelineSparseDist`.
        pipeline_postproc: see `TrainPipelineSparseDist`.
        custom_model_fwd: see `TrainPipelineSparseDist`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        context_type: type[TrainPipelineContext] = TrainPipelineContext,
        pipeline_postproc: bool = False,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            apply_jit=apply_jit,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
        )
        self._data_dist_stream = None  # ids are sent on the default stream

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have one batch in the pipeline."""
        if not self.batches:
            self.enqueue_batch(dataloader_iter)

    def _wait_for_batch(self) -> None:
        hand_over(self._memcpy_stream, self.batches[0])

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        self._send(0)
        losses, output = self._model_fwd(self.batches[0])
        self.enqueue_batch(dataloader_iter)
        return losses, output
