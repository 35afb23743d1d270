"""Training steps, and the pipeline that overlaps them with nothing but the copy of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tessera.training.distributed.model.model_parallel import get_unwrapped_module
from tessera.training.distributed.train_pipeline.backward_injection import (
    InjectionSite,
    register_backward_hook,
)
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

    An error of the iterator is raised by `progress` before the step that it belongs to; nothing in
    the pipeline is lost, and `progress` may be called again.

    Args:
        model: its forward pass takes a batch and returns (losses, output).
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        custom_model_fwd: called with the batch in the model's place; returns (losses, output).
    """

    _copy_priority = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[In], tuple[torch.Tensor, Out]] | None = None,
    ) -> None:
        self._model = model
        self._model_fwd: Callable[[Any], Any] = custom_model_fwd or model
        self._optimizer = optimizer
        self._device = device
        self._memcpy_stream = make_stream(device, self._copy_priority)
        self._source: BatchSource[In] = BatchSource()
        self.batches: deque[Any] = deque()

    def register_backward_hook(
        self, site: InjectionSite, work: Callable[[Any], Any]
    ) -> RemovableHandle:
        """Have work done within each backward pass.

        Args:
            site: where; its module's path is one of the model inside of wrappers.
            work: called with this pipeline.

        Returns:
            What removes it.

        Raises:
            ValueError: the model has no such module, or none of its parameters has a gradient.
        """
        model = get_unwrapped_module(self._model)
        return register_backward_hook(site, model, lambda _: work(self))

    # The stages

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one more batch to the device; False: none is left."""
        batch = self._source.next(dataloader_iter)
        if batch is None:
            return False
        with on_stream(self._memcpy_stream):
            self.batches.append(to_device(batch, self._device))
        return True

    def dequeue_batch(self) -> None:
        """Forget the batch that was worked on."""
        self.batches.popleft()

    def fill_pipeline(self, dataloader_iter: Iterator[In]) -> None:
        """Have in the pipeline what a step needs, as far as there are batches."""
        if not self.batches:
            self.enqueue_batch(dataloader_iter)

    def reset(self) -> None:
        """Forget the batches in the pipeline and the iterator; on all ranks alike."""
        self.batches.clear()
        self._source = BatchSource()

    @property
    def _has_work(self) -> bool:
        """Whether there is a batch for a step."""
        return bool(self.batches)

    def _wait_for_batch(self) -> None:
        """Let the current stream use the first batch."""
        hand_over(self._memcpy_stream, self.batches[0])

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[torch.Tensor, Out]:
        """The forward pass of the first batch, and what is done beside it for later ones."""
        losses, output = self._model_fwd(self.batches[0])
        self.enqueue_batch(dataloader_iter)
        return losses, output

    def _backward(self, losses: torch.Tensor) -> None:
        torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One step; in evaluation mode (``model.eval()``) only its forward pass.

        Raises:
            StopIteration: no batch is left.
            UserError: the model cannot be traced, where the pipeline has to.
        """
        self.fill_pipeline(dataloader_iter)
        if not self._has_work:
            raise StopIteration
        training = self._model.training
        if training:
            self._optimizer.zero_grad()
        self._wait_for_batch()
        losses, output = self._forward(dataloader_iter)
        if training:
            self._backward(losses)
            self._optimizer.step()
        self.dequeue_batch()
        return output
