"""Layers as CUDA graphs: ``train.cuda_graphs``.

A step of a small dense part is some hundred kernels of a few microseconds, which one thread of the CPU
cannot launch as fast as a GPU runs them.  Here every outermost module that holds no tables (of a DLRM: bottom
MLP, interaction, top MLP) has its forward and its backward pass recorded once, with the first
batch, and replayed from then on by one launch each.  So are the losses, a dozen kernels more.

Recorded are passes of one shape.  Batches of another one (the last of an epoch), evaluations, the
second use of a module within a step, modules that take anything but tensors, and those whose method ``is_one_kernel``
says so of their inputs (a recording would copy these first) run as they are.  What a module draws at random is drawn anew in
every replay.  A gradient lies where the next backward pass puts the next one, so that a step must have used it
before: gradients are not added up over batches.

Legend: a module's inputs, its output and its parameters are ``x``, ``y`` and ``w``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from tessera.training.distributed.train_pipeline.tracing import plain_modules

WARM_UPS = 3
"""Passes before a recording, in which libraries choose algorithms and take their memory."""


class Recording:
    """A forward and a backward pass of ``module``, called as it is, for inputs like ``xs``.

    Attributes:
        pending: whether its forward pass was replayed and its backward pass not yet: what the one keeps for
            the other would be lost by another forward pass.

    Args:
        module: its buffers are left as they are.
        layers: the context of a forward pass.
        xs: on a GPU.

    Raises:
        TypeError: the module does not give one tensor.
        RuntimeError: torch's, of a pass that cannot be recorded.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: Callable[[], AbstractContextManager[None]],
        xs: Sequence[Tensor],
    ) -> None:
        self.xs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
        self._ws = [w for w in module.parameters() if w.requires_grad]
        # Other leaves over the same memory: what adds up the gradients of those that the optimizer has
        # belongs to another stream.
        own = {
            name: w.detach().requires_grad_(w.requires_grad)
            for name, w in module.named_parameters()
        }
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        wanted = [x for x in (*self.xs, *own.values()) if x.requires_grad]

        def call() -> Tensor:
            with layers():
                y = functional_call(module, own, tuple(self.xs))
            if not isinstance(y, Tensor):
                raise TypeError(f"{type(module).__name__} gives a {type(y).__name__}")
            return y

        def gradients(y: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(y, wanted, grad, allow_unused=True)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                y = call()
                gradients(y, torch.zeros_like(y))
                del y
        torch.cuda.current_stream().wait_stream(stream)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # thread_local: loaders of batches and the watchdog of collectives go on meanwhile.
        how: dict[str, Any] = {"capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._forward, **how):
            self._y = call()
        self._grad = torch.empty_like(self._y)
        with torch.cuda.graph(self._backward, pool=self._forward.pool(), **how):
            found = iter(gradients(self._y, self._grad))
        self._grads = [
            next(found) if given.requires_grad else None for given in (*self.xs, *self._ws)
        ]
        self._y = self._y.detach()
        self.pending = False
        for buffer, before in buffers:
            buffer.copy_(before)

    def __call__(self, *xs: Tensor) -> Tensor:
        """The output for other inputs of the same shapes; it holds until the next call."""
        y: Tensor = _Replay.apply(self, *xs, *self._ws)  # type: ignore[no-untyped-call] # torch's
        return y

    def replay_forward(self, xs: Sequence[Tensor]) -> Tensor:
        """The output, without a gradient."""
        for own, given in zip(self.xs, xs, strict=True):
            own.copy_(given)
        self._forward.replay()
        self.pending = True
        return self._y.detach()

    def replay_backward(self, grad: Tensor) -> list[Tensor | None]:
        """The gradients of inputs and parameters; they hold until the next call."""
        self._grad.copy_(grad)
        self._backward.replay()
        self.pending = False
        return [None if found is None else found.detach() for found in self._grads]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *given: Tensor) -> Tensor:
        ctx.recording = recording
        with torch.no_grad():
            return recording.replay_forward(given[: len(recording.xs)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.recording.replay_backward(grads[0]))


class RecordedForward:
    """The forward pass of a module: its recording where one fits, otherwise its own.

    Args:
        module: on a GPU.
        layers: the context of a forward pass.
    """

    def __init__(
        self, module: nn.Module, layers: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._module, self._own, self._layers = module, module.forward, layers
        self._is_one_kernel: Callable[..., bool] | None = getattr(module, "is_one_kernel", None)
        self._like: list[tuple[Any, ...]] | None = None
        self._recording: Recording | None = None

    def __call__(self, *xs: Any) -> Any:
        """What the module's own forward pass gives."""
        trains = self._module.training and torch.is_grad_enabled()
        if not trains or not all(isinstance(x, Tensor) for x in xs):
            return self._own(*xs)
        if self._is_one_kernel is not None and self._is_one_kernel(*xs):
            return self._own(*xs)
        like = [(x.shape, x.dtype, x.requires_grad) for x in xs]
        if self._like is None:
            self._like = like  # from here on `_own` is called, until there is a recording
            self._recording = Recording(self._module, self._layers, xs)
        recording = self._recording
        if like != self._like or recording is None or recording.pending:
            return self._own(*xs)
        return recording(*xs)


def record_layers(model: nn.Module, layers: Callable[[], AbstractContextManager[None]]) -> None:
    """Let every outermost part of ``model`` with layers and without tables be recorded when it is called.

    Parts without sub-modules (a dropout, a sum) are left as they are.

    Args:
        model: sharded, on a GPU.
        layers: makes the context of a forward pass; autocast in it must not cache weights.
    """
    for path in plain_modules(model):
        part = model.get_submodule(path)
        if any(True for _ in part.children()):
            # On the instance: nn.Module.__call__ finds it before the class's.
            part.forward = RecordedForward(part, layers)
