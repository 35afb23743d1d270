"""The pipeline whose model is compiled by ``torch.compile`` after some steps."""

# ruff: noqa: PLR0917 - the signature TorchRec users know

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tessera.training.distributed.train_pipeline.pipelines import In, Out, TrainPipelineBase
from tessera.training.distributed.train_pipeline.streams import to_device


@dataclass
class TorchCompileConfig:
    """How ``torch.nn.Module.compile`` is called, see https://pytorch.org/docs/stable/generated/torch.compile.html.

    Attributes:
        fullgraph: whether a part that cannot be compiled is an error.
        dynamic: whether shapes may change without compiling again; None: those that were seen to.
        backend: the compiler.
        compile_on_iter: steps before the model is compiled.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int = 3


class TrainPipelinePT2(TrainPipelineBase[In, Out]):
    """Takes a batch, trains on it, and compiles the model before step ``compile_on_iter``.

    Nothing overlaps: a batch is taken and copied when the one before it was trained on.

    Args:
        model: its forward pass takes a batch and returns (losses, output).
        optimizer: of the parameters that the backward pass does not update itself.
        device: where the model is.
        compile_configs: how the model is compiled.
        pre_compile_fn: called with the model before it is compiled.
        post_compile_fn: called with the model afterwards.
        input_transformer: called with each batch on the device; the model gets its result.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], Any] | None = None,
        post_compile_fn: Callable[[nn.Module], Any] | None = None,
        input_transformer: Callable[[In], In] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device)
        self._compile_configs = compile_configs or TorchCompileConfig()
        self._pre_compile_fn = pre_compile_fn
        self._post_compile_fn = post_compile_fn
        self._input_transformer = input_transformer
        self._steps = 0

    def enqueue_batch(self, dataloader_iter: Iterator[In]) -> bool:
        """Copy one more batch to the device, and wait for it; False: none is left."""
        batch = self._source.next(dataloader_iter)
        if batch is None:
            return False
        moved = to_device(batch, self._device, non_blocking=False)
        self.batches.append(self._input_transformer(moved) if self._input_transformer else moved)
        return True

    def _wait_for_batch(self) -> None:
        """The copy was waited for."""

    def _compile(self) -> None:
        if self._pre_compile_fn:
            self._pre_compile_fn(self._model)
        settings = self._compile_configs
        self._model.compile(
            fullgraph=settings.fullgraph, dynamic=settings.dynamic, backend=settings.backend
        )
        if self._post_compile_fn:
            self._post_compile_fn(self._model)

    def _forward(self, dataloader_iter: Iterator[In]) -> tuple[torch.Tensor, Out]:
        del dataloader_iter
        if self._steps == self._compile_configs.compile_on_iter:
            self._compile()
        losses, output = self._model_fwd(self.batches[0])
        self._steps += 1
        return losses, output
