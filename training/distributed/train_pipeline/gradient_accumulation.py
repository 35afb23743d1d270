"""Steps of the dense optimizer on the gradients of several batches.

Tables of sharded modules with fused kernels are not part of it: each backward pass updates them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic

from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from tessera.errors import UserError
from tessera.training.distributed.model.model_parallel import DistributedModelParallel
from tessera.training.distributed.train_pipeline.pipelines import (
    In,
    Out,
    TrainPipeline,
)
from tessera.training.distributed.train_pipeline.replicated import replicated_parts


@dataclass
class GradientAccumulationConfig:
    """How many batches a step of the optimizer is for.

    Attributes:
        is_enabled: whether gradients are added up; more than one step sets it.
        num_steps: batches to a step of the optimizer.
        num_warmup_steps: first batches after each of which the ranks add up their gradients, as
            ``DistributedDataParallel(static_graph=True)`` needs once at least.

    Raises:
        UserError: a number below 1.
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup_steps"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1")
        self.is_enabled = self.is_enabled or self.num_steps > 1


class _EveryFewSteps:
    """An optimizer that clears gradients and takes a step once in so many calls."""

    def __init__(self, optimizer: Optimizer, num_steps: int) -> None:
        self._optimizer = optimizer
        self._num_steps = num_steps
        self.batches = 0
        self.since_step = 0
        self._is_clear = False

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        if not self._is_clear:
            self._optimizer.zero_grad(set_to_none=set_to_none)
            self._is_clear = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1
        self.since_step += 1
        if self.since_step == self._num_steps:
            self.step_now(*args, **kwargs)

    def step_now(self, *args: Any, **kwargs: Any) -> None:
        self._optimizer.step(*args, **kwargs)
        self.since_step = 0
        self._is_clear = False

    def forget(self) -> None:
        """Clear gradients at the next opportunity."""
        self._is_clear = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class GradientAccumulationWrapper(Generic[In, Out]):
    """Adds up the dense gradients of several batches of a pipeline before the optimizer takes a step.

    Gradients are added, not averaged: divide the loss by ``config.num_steps`` for the mean.  Between
    ranks they are added up once for each step, after the first ``config.num_warmup_steps`` batches.

    Args:
        pipeline: takes the steps with its attribute ``_optimizer``, as every `TrainPipelineBase` does;
            it is replaced while this object is used.
        optimizer: the pipeline's optimizer.
        model: the pipeline's model.
        config: how many batches.

    Raises:
        UserError: accumulation is enabled and the pipeline has no optimizer of its own.
    """

    def __init__(
        self,
        pipeline: TrainPipeline[In, Out],
        optimizer: Optimizer,
        model: nn.Module,
        config: GradientAccumulationConfig,
    ) -> None:
        self._pipeline = pipeline
        self._config = config
        self._optimizer = _EveryFewSteps(optimizer, config.num_steps)
        root = model.module if isinstance(model, DistributedModelParallel) else model
        self._parallel = replicated_parts(root)
        if not config.is_enabled:
            return
        if not hasattr(pipeline, "_optimizer"):
            raise UserError(
                f"a {type(pipeline).__name__} has no _optimizer; gradients are added up for a "
                "TrainPipelineBase, or a pipeline that takes its steps with an attribute of that name"
            )
        pipeline._optimizer = self._optimizer  # noqa: SLF001 - what this class is for

    @property
    def current_step(self) -> int:
        """How many batches were trained on."""
        return self._optimizer.batches

    def set_step(self, step: int) -> None:
        """Go on as if ``step`` batches had been trained on."""
        self._optimizer.batches = step
        self._optimizer.since_step = step % self._config.num_steps

    def _adds_up(self, *, is_last_batch: bool) -> bool:
        """Whether the ranks add up their gradients in the next backward pass."""
        warms_up = self.current_step < self._config.num_warmup_steps
        steps_now = self._optimizer.since_step + 1 == self._config.num_steps
        return is_last_batch or warms_up or steps_now

    def progress(self, dataloader_iter: Iterator[In], is_last_batch: bool | None = None) -> Out:  # noqa: FBT001 - the signature TorchRec users know
        """One batch; see the pipeline's ``progress``.

        Args:
            dataloader_iter: gives the batches.
            is_last_batch: whether the optimizer takes its step after this batch in any case.

        Raises:
            StopIteration: no batch is left; the optimizer has taken a step on what was not a full one.
        """
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        last = bool(is_last_batch)
        with contextlib.ExitStack() as apart:
            if not self._adds_up(is_last_batch=last):
                for part in self._parallel:
                    apart.enter_context(part.no_sync())
            try:
                output = self._pipeline.progress(dataloader_iter)
            except StopIteration:
                if self._optimizer.since_step:
                    self._add_up()
                    self._optimizer.step_now()
                raise
        if last and self._optimizer.since_step:
            self._optimizer.step_now()
        return output

    def _add_up(self) -> None:
        """Average over the ranks the gradients that no backward pass has averaged.

        What a backward pass averaged before is alike on all ranks, so its average is itself.
        """
        for part in self._parallel:
            group = part.process_group
            for parameter in part.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad.div_(dist.get_world_size(group))

    def reset(self) -> None:
        """Begin anew, with an empty pipeline."""
        self.set_step(0)
        self._optimizer.forget()
        reset = getattr(self._pipeline, "reset", None)
        if reset is not None:
            reset()

    def __getattr__(self, name: str) -> Any:
        """What else the pipeline has."""
        return getattr(self._pipeline, name)
