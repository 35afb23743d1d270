"""A collective as a step of autograd: started, awaited later, and the same backwards.

Each collective is described by an `Exchange`: how its tensors are laid out for the way and put
together behind it, forwards and backwards.  It becomes two autograd functions.  The request's
starts the collective and gives a token; the wait's takes the token and gives the result.
Backwards the wait's function starts the gradients' collective and the request's waits for it, so
that whatever autograd does in between overlaps with communication in both directions.

Every rank must take part in the backward pass too: the result requires a gradient whenever
gradients are recorded, also where a rank's own input does not (a rank without tables).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.transport import Codec, Pending, start_all_to_all

W = TypeVar("W")

_gradient_division = True


def get_gradient_division() -> bool:
    """Whether gradients that travel back are divided by the number of ranks."""
    return _gradient_division


def set_gradient_division(val: bool) -> None:  # noqa: FBT001 - the reference's signature
    """Choose whether gradients that travel back are divided by the number of ranks.

    True, the default, fits losses that are means over the local batch: tables then see the
    gradient of the mean over the global batch, as `DistributedDataParallel` gives the rest of
    the model.  Read when the backward pass runs.
    """
    global _gradient_division  # noqa: PLW0603 - one switch for the process, as in the reference
    _gradient_division = val


class Exchange(ABC):
    """How the tensors of one collective are laid out and sent, forwards and backwards.

    Attributes:
        codecs: how numbers travel; None: as they are.
        pg: the ranks; `start_exchange` sets it, and the shapes.
        input_shapes: of the inputs.
        request: the first of its steps of autograd, a class of its own, so that profiles name it;
            a subclass gives the names of both (``steps=``).
        wait: the second.
    """

    codecs: QuantizedCommCodecs | None
    pg: dist.ProcessGroup
    input_shapes: list[torch.Size]
    request: ClassVar[type[ExchangeRequest]]
    wait: ClassVar[type[ExchangeWait]]

    def __init_subclass__(cls, *, steps: tuple[str, str] | None = None) -> None:
        super().__init_subclass__()
        if steps is not None:
            cls.request = type(steps[0], (ExchangeRequest,), {"__doc__": f"Starts {cls.__name__}."})
            cls.wait = type(steps[1], (ExchangeWait,), {"__doc__": f"Waits for {cls.__name__}."})

    def lay_out(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The inputs as one flat tensor, in the order in which they are sent."""
        if len(inputs) == 1:
            return inputs[0].contiguous().view(-1)
        return torch.cat([tensor.reshape(-1) for tensor in inputs])

    @abstractmethod
    def send(self, flat: Tensor, codec: Codec | None, *, back: bool) -> Pending:
        """Start the collective, or with ``back`` that of the gradients."""

    @abstractmethod
    def finish(self, received: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Make the outputs of what was received."""

    def alone(self, inputs: tuple[Tensor, ...]) -> Any:
        """The result where there is one rank."""
        return inputs[0]

    def lay_out_gradient(self, gradients: tuple[Tensor, ...]) -> Tensor:
        """The outputs' gradients as one flat tensor, in the order in which they are sent."""
        return Exchange.lay_out(self, gradients)

    def finish_gradient(self, received: Tensor) -> tuple[Tensor, ...]:
        """Make the inputs' gradients of what was received; they may share its memory.

        Unless an exchange says otherwise, they were received one after the other.
        """
        if len(self.input_shapes) == 1:
            return (received.view(self.input_shapes[0]),)
        parts = received.split_with_sizes([shape.numel() for shape in self.input_shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.input_shapes, strict=True))


class AllToAll(Exchange):
    """An exchange of pieces; gradients go back the way that the vectors came."""

    @abstractmethod
    def sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        """How many numbers go to each rank and come from each, forwards."""

    def send(self, flat: Tensor, codec: Codec | None, *, back: bool) -> Pending:
        """Send each rank its piece."""
        send, receive = reversed(self.sizes()) if back else self.sizes()
        return start_all_to_all(self.pg, flat, send, receive, codec)


class Request(Awaitable[W], Generic[W]):
    """Represents a collective that was started.

    Args:
        pg: its group.
        device: where its tensors live.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.pg = pg
        self.device = device
        self.info: Exchange | None = None
        self.pending: Pending | None = None
        self.wait_function: type[ExchangeWait] = ExchangeWait
        self.dummy_tensor: Tensor | None = None
        """Has no elements; ties the wait to the request in the gradient graph."""

    def _wait_impl(self) -> W:
        token, self.dummy_tensor = self.dummy_tensor, None
        assert token is not None, "a request is waited for once"
        result: W = self.wait_function.apply(self.pg, self, token)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return result

    def take_pending(self) -> Tensor:
        """Wait for the collective that is under way."""
        assert self.pending is not None
        received, self.pending = self.pending.wait(), None
        return received


class ExchangeRequest(Function):
    """Starts an `Exchange`; backwards, waits for its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        pg: dist.ProcessGroup,
        myreq: Request[Any],
        info: Exchange,
        *inputs: Tensor,
    ) -> Tensor:
        """Start the collective and return the token that the wait takes."""
        ctx.pg, ctx.myreq, ctx.info = pg, myreq, info
        myreq.info = info
        codec = None if info.codecs is None else info.codecs.forward
        myreq.pending = info.send(info.lay_out(inputs), codec, back=False)
        return inputs[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the inputs' gradients."""
        del unused
        gradients = ctx.info.finish_gradient(ctx.myreq.take_pending())
        if _gradient_division:
            for gradient in gradients:
                gradient.div_(ctx.pg.size())
        return (None, None, None, *gradients)


class ExchangeWait(Function):
    """Waits for an `Exchange`; backwards, starts the way of its gradients."""

    @staticmethod
    def forward(
        ctx: Any, pg: dist.ProcessGroup, myreq: Request[Any], *dummy_tensor: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Wait for the collective and return its outputs."""
        del pg, dummy_tensor
        assert myreq.info is not None
        ctx.myreq, ctx.info = myreq, myreq.info
        return myreq.info.finish(myreq.take_pending())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[None, None, Tensor]:
        """Start; returns the token's gradient, which has no elements."""
        info: Exchange = ctx.info
        codec = None if info.codecs is None else info.codecs.backward
        flat = info.lay_out_gradient(grad_output)
        ctx.myreq.pending = info.send(flat, codec, back=True)
        return None, None, grad_output[0].new_empty(0)


def start_exchange(
    group: dist.ProcessGroup | None,
    info: Exchange,
    inputs: tuple[Tensor, ...],
) -> Awaitable[Any]:
    """Start ``info`` on ``inputs`` among the ranks of ``group`` (None: the default group)."""
    pg = group_or_default(group)
    if pg.size() == 1:
        return NoWait(info.alone(inputs))
    if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in inputs):
        inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
    info.pg, info.input_shapes = pg, [tensor.size() for tensor in inputs]
    request: Request[Any] = Request(pg, inputs[0].device)
    request.wait_function = info.wait
    request.dummy_tensor = info.request.apply(pg, request, info, *inputs)  # type: ignore[no-untyped-call] # as above
    return request


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return ``group``, or the default group where it is None.

    Raises:
        ValueError: no group is given and torch.distributed is not initialized.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError(
            "group is None and torch.distributed is not initialized; call"
            " torch.distributed.init_process_group first"
        )
    return group
