"""The pipeline that also brings rows into the device's cache ahead of their lookup."""

# ruff: noqa: FBT001, FBT002, PLR0917 - signatures that TorchRec users know

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.training.distributed.collections.sharded_collection import ShardedEmbeddingModule
from tessera.training.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward,
    PrefetchPipelinedForward,
)
from tessera.training.distributed.train_pipeline.pipelines import In, Out
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist
from tessera.training.distributed.train_pipeline.streams import hand_over, make_stream, on_stream


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """`TrainPipelineSparseDist` for tables of the kernel ``fused_uvm_caching``.

    A stage more: while batch ``i`` runs, the rows of batch ``i + 1`` are brought from host memory
    into the cache in device memory, and the ids of batch ``i + 2`` travel.  Rows that batch ``i``
    updates and batch ``i + 1`` needs stay in the cache, so nothing is read out of date: give the
    sharder ``fused_params={"prefetch_pipeline": True}``, which lets FBGEMM hold on to them.

    Args:
        model: see `TrainPipelineSparseDist`.
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        execute_all_batches: see `TrainPipelineSparseDist`.
        apply_jit: see `TrainPipelineSparseDist`.
        pipeline_postproc: see `TrainPipelineSparseDist`.
        custom_model_fwd: see `TrainPipelineSparseDist`.
    """

    _pipelined_forward_type: ClassVar[type[BaseForward[Any]]] = PrefetchPipelinedForward

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        pipeline_postproc: bool = True,
        custom_model_fwd: Callable[[In], tuple[Tensor, Out]] | None = None,
    ) -> None:
        self._prefetch_stream = make_stream(device)
        self._default_stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        super().__init__(
            model,
            optimizer,
            device,
            execute_all_batches,
            apply_jit,
            context_type=PrefetchTrainPipelineContext,
            pipeline_postproc=pipeline_postproc,
            custom_model_fwd=custom_model_fwd,
        )

    @property
    def _input_stream(self) -> torch.cuda.Stream | None:
        return self._prefetch_stream

    def _prefetch(self, context: PrefetchTrainPipelineContext) -> None:
        """Bring the rows of a batch whose ids travel into the cache; once for each batch."""
        prefetch_embeddings(
            context,
            self._modules.forwards,
            self._data_dist_stream,
            self._prefetch_stream,
            self._default_stream,
        )

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have three batches in the pipeline, the first prefetched, the second on its way."""
        if not self.batches and self.enqueue_batch(dataloader_iter):
            self._send(0)
            self._prefetch(self.contexts[0])
        # One batch is all that an iterator may have left for the next one.
        if len(self.batches) == 1 and self.enqueue_batch(dataloader_iter):
            self._send(1)
        if len(self.batches) == 2:
            self.enqueue_batch(dataloader_iter)

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        """The forward pass of the first batch; the next one's rows and the third one's ids come."""
        del dataloader_iter
        self._modules.set_context(self.contexts[0])
        if len(self.batches) > 2:
            self.start_sparse_data_dist(self.batches[2], self.contexts[2])
        losses, output = self._model_fwd(self.batches[0])
        if len(self.batches) > 1:
            self._prefetch(self.contexts[1])
        if len(self.batches) > 2:
            self.wait_sparse_data_dist(self.contexts[2])
        return losses, output


def prefetch_embeddings(
    context: PrefetchTrainPipelineContext,
    forwards: list[Any],
    data_dist_stream: torch.cuda.Stream | None,
    prefetch_stream: torch.cuda.Stream | None,
    forward_stream: torch.cuda.Stream | None,
) -> None:
    """Bring a batch's rows into the cache of the device, for modules whose tables have one.

    Args:
        context: the batch's; its ids have begun to travel.
        forwards: the pipelined forward passes of the modules, `PrefetchPipelinedForward`.
        data_dist_stream: the stream that ids arrive on; None on a CPU.
        prefetch_stream: the stream that rows are brought on.
        forward_stream: the stream that the rows are looked up on.
    """
    for forward in forwards:
        if forward.name not in context.input_dist_tensors_requests:
            continue
        data, ctx = forward.arrived(context, data_dist_stream)
        with on_stream(prefetch_stream):
            hand_over(data_dist_stream, data, ctx)
            if isinstance(forward.module, ShardedEmbeddingModule):
                forward.module.prefetch(data, forward_stream)
        context.module_input_post_prefetch[forward.name] = data
        context.module_contexts_post_prefetch[forward.name] = ctx
