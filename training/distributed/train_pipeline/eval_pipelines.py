"""Pipelines that run forward passes alone."""

# ruff: noqa: FBT001, FBT002 - signatures that TorchRec users know

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tessera.training.distributed.train_pipeline.data_loading import DataLoadingThread
from tessera.training.distributed.train_pipeline.embedding_pipelines import (
    TrainPipelineFusedSparseDist,
)
from tessera.training.distributed.train_pipeline.pipelines import BatchSource, In, Out
from tessera.training.distributed.train_pipeline.sparse_dist import TrainPipelineSparseDist


class _LoadedByThread(BatchSource[In]):
    """An iterator's batches, taken by a thread and copied to the device there.

    When another iterator comes, the thread of the one before is stopped; the batch that it had taken
    is given first.
    """

    def __init__(self, device: torch.device, memcpy_stream: torch.cuda.Stream | None) -> None:
        super().__init__()
        self._device = device
        self._memcpy_stream = memcpy_stream
        self._thread: DataLoadingThread[In] | None = None

    def next(self, dataloader_iter: Iterator[In]) -> In | None:
        if dataloader_iter is not self._iterator:
            left = self.stop()
            self._iterator = dataloader_iter
            self.exhausted = False
            self._thread = DataLoadingThread(
                self._device,
                dataloader_iter,
                to_device_non_blocking=True,
                memcpy_stream=self._memcpy_stream,
            )
            self._thread.start()
            if left is not None:
                return left
        if self.exhausted or self._thread is None:
            return None
        batch: In | None = self._thread.get_next_batch()
        self.exhausted = batch is None
        return batch

    def stop(self) -> In | None:
        """Stop the thread, once the iterator has given what it was asked for; return that."""
        if self._thread is None:
            return None
        self._thread.stop()
        self._thread.join()
        left: In | None = self._thread.get_next_batch()
        self._thread = None
        return left

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.stop()


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Forward passes without gradients; a thread takes the batches and copies them.

    It needs no `TrainPipelineSparseDist.reset` between two iterators.

    Args:
        model: see `TrainPipelineSparseDist`.
        optimizer: not used; TorchRec's pipelines all take one.
        device: where the model is.
        apply_jit: see `TrainPipelineSparseDist`.
        pipeline_postproc: see `TrainPipelineSparseDist`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        apply_jit: bool = False,
        pipeline_postproc: bool = False,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            apply_jit=apply_jit,
            pipeline_postproc=pipeline_postproc,
        )
        self._loaded: _LoadedByThread[In] = _LoadedByThread(device, self._memcpy_stream)
        self._source = self._loaded

    def reset(self) -> None:
        """Stop the thread, and forget the batches in the pipeline; on all ranks alike."""
        self._loaded.stop()
        super().reset()
        self._loaded = _LoadedByThread(self._device, self._memcpy_stream)
        self._source = self._loaded

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """The model's output for the oldest batch in the pipeline.

        Raises:
            StopIteration: no batch is left.
            UserError: the model cannot be traced.
        """
        self.fill_pipeline(dataloader_iter)
        if not self._has_work:
            raise StopIteration
        self._wait_for_batch()
        with torch.no_grad():
            _, output = self._forward(dataloader_iter)
        self.dequeue_batch()
        return output


class EvalPipelineFusedSparseDist(TrainPipelineFusedSparseDist[In, Out]):
    """Forward passes without gradients, on vectors that are looked up ahead.

    Args:
        args: see `TrainPipelineFusedSparseDist`.
        enable_embedding_lookup_prefetch: look the next batch up while the current forward pass runs;
            the vectors of two batches are then on the device.
        kwargs: see `TrainPipelineFusedSparseDist`.
    """

    def __init__(
        self, *args: Any, enable_embedding_lookup_prefetch: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._looks_up_next = enable_embedding_lookup_prefetch

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        losses, output = super()._forward(dataloader_iter)
        if self._looks_up_next and len(self.batches) > 1:
            self.start_embedding_lookup(self.batches[1], self.contexts[1])
        return losses, output

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """The model's output for the oldest batch in the pipeline.

        Raises:
            StopIteration: no batch is left.
            UserError: the model cannot be traced.
        """
        self.fill_pipeline(dataloader_iter)
        if not self._has_work:
            raise StopIteration
        self._wait_for_batch()
        with torch.no_grad():
            _, output = self._forward(dataloader_iter)
        self.dequeue_batch()
        return output


class TrainEvalHybridPipelineBase(TrainPipelineSparseDist[In, Out]):
    """Trains or evaluates each batch, as ``model.training`` says when its turn comes.

    Batches that are in the pipeline when the mode changes are worked on in the new mode: call
    `progress` until it raises ``StopIteration`` before the mode is changed, where that matters.
    Forward passes in evaluation mode make no gradients.
    """

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[Tensor, Out]:
        with torch.set_grad_enabled(self._model.training):
            return super()._forward(dataloader_iter)
