"""Training steps, and the pipeline that overlaps them with nothing but the copy of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tessera.training.distributed.train_pipeline.streams import (
    make_stream,
    on_stream,
    to_device,
    wait_for_batch,
)

In = TypeVar("In")
Out = TypeVar("Out")


class TrainPipeline(ABC, Generic[In, Out]):
    """Trains a model batch after batch."""

    @abstractmethod
    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step: the model's output for the oldest batch in the pipeline.

        Raises:
            StopIteration: no batch is left.
        """


class BatchSource(Generic[In]):
    """An iterator's batches; one that ended is not asked again."""

    def __init__(self) -> None:
        self._iterator: Iterator[In] | None = None
        self.exhausted = False

    def next(self, dataloader_iter: Iterator[In]) -> In | None:
        """Return the next batch, or None at the end."""
        if dataloader_iter is not self._iterator:
            self._iterator = dataloader_iter
            self.exhausted = False
        if self.exhausted:
            return None
        batch = next(dataloader_iter, None)
        self.exhausted = batch is None
        return batch


def backward_and_step(losses: torch.Tensor, optimizer: Optimizer) -> None:
    """Run the second half of a step: the backward pass and the update."""
    torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
    optimizer.step()


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Copies the next batch to the device while the current one is worked on.

    Args:
        model: its forward pass takes a batch and returns (losses, output).
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._memcpy_stream = make_stream(device)
        self._source: BatchSource[In] = BatchSource()
        self._batch: Any = None

    def _copy_next(self, dataloader_iter: Iterator[In]) -> Any:
        batch = self._source.next(dataloader_iter)
        if batch is None:
            return None
        with on_stream(self._memcpy_stream):
            return to_device(batch, self._device)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; in evaluation mode (``model.eval()``) only its forward pass.

        Raises:
            StopIteration: no batch is left.
        """
        batch = self._batch if self._batch is not None else self._copy_next(dataloader_iter)
        if batch is None:
            raise StopIteration
        wait_for_batch(batch, self._memcpy_stream)
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        losses, output = self._model(batch)
        self._batch = self._copy_next(dataloader_iter)
        if training:
            backward_and_step(losses, self._optimizer)
        result: Out = output
        return result
