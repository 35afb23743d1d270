"""Training steps, and the pipeline that overlaps them with nothing but the copy of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from tessera.training.distributed.train_pipeline.streams import (
    hand_over,
    make_stream,
    on_stream,
    to_device,
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


class TrainPipelineBase(TrainPipeline[In, Out]):
    """Copies the next batch to the device while the current one is worked on.

    Args:
        model: its forward pass takes a batch and returns (losses, output).
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
    """

    _copy_priority = 0

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._memcpy_stream = make_stream(device, self._copy_priority)
        self._source: BatchSource[In] = BatchSource()
        self._batches: deque[Any] = deque()

    def _enqueue(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one more batch to the device; False: none is left."""
        batch = self._source.next(dataloader_iter)
        if batch is None:
            return False
        with on_stream(self._memcpy_stream):
            self._batches.append(to_device(batch, self._device))
        return True

    def _fill(self, dataloader_iter: Iterator[In]) -> bool:
        """Have in the pipeline what a step needs; False: there is no batch for one."""
        return bool(self._batches) or self._enqueue(dataloader_iter)

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[torch.Tensor, Out]:
        """The forward pass of the first batch, and what is done beside it for later ones."""
        losses, output = self._model(self._batches[0])
        self._enqueue(dataloader_iter)
        return losses, output

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; in evaluation mode (``model.eval()``) only its forward pass.

        Raises:
            StopIteration: no batch is left.
            UserError: the model cannot be traced, where the pipeline has to.
        """
        if not self._fill(dataloader_iter):
            raise StopIteration
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        hand_over(self._memcpy_stream, self._batches[0])
        losses, output = self._forward(dataloader_iter)
        if training:
            torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._optimizer.step()
        self._batches.popleft()
        return output
