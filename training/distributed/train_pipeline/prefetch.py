"""The pipeline that also brings rows into the device's cache ahead of their lookup."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.training.distributed.collections.sharded_collection import ShardedEmbeddingModule
from tessera.training.distributed.train_pipeline.forwards import (
    BaseForward,
    PrefetchPipelinedForward,
    PrefetchTrainPipelineContext,
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
    """

    _context: PrefetchTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        apply_jit: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, apply_jit)
        self._prefetch_stream = make_stream(device)
        self._default_stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _make_context(self) -> PrefetchTrainPipelineContext:
        return PrefetchTrainPipelineContext()

    def _make_forward(self, path: str, args: Any, module: Any) -> BaseForward[Any]:
        return PrefetchPipelinedForward(path, args, module, self._context, self._prefetch_stream)

    def _prefetch(self) -> None:
        """Take the batch whose ids travel, and bring its rows into the cache."""
        context = self._context
        for forward in self._forwards or []:
            request = context.input_dist_tensors_requests.pop(forward.name)
            with on_stream(self._data_dist_stream):
                data = request.wait()
            ctx = context.module_contexts.pop(forward.name)
            with on_stream(self._prefetch_stream):
                hand_over(self._data_dist_stream, data, ctx)
                if isinstance(forward.module, ShardedEmbeddingModule):
                    forward.module.prefetch(data, self._default_stream)
            context.module_input_post_prefetch[forward.name] = data
            context.module_contexts_post_prefetch[forward.name] = ctx

    def _fill(self, dataloader_iter: Iterator[In]) -> bool:
        """Have three batches in the pipeline, the first prefetched, the second on its way."""
        if self._forwards is None:
            self._forwards = self._attach()
        if not self._batches and self._enqueue(dataloader_iter):
            self._send(0)
            self._prefetch()
        # One batch is all that an iterator may have left for the next one.
        if len(self._batches) == 1 and self._enqueue(dataloader_iter):
            self._send(1)
        if len(self._batches) == 2:
            self._enqueue(dataloader_iter)
        return self._has_work

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        """The forward pass of the first batch; the next one's rows and the third one's ids come."""
        del dataloader_iter
        if len(self._batches) > 2:
            self._start_sparse_data_dist(self._batches[2])
        losses, output = self._model(self._batches[0])
        if len(self._batches) > 1:
            self._prefetch()
        if len(self._batches) > 2:
            self._wait_sparse_data_dist()
        return losses, output
