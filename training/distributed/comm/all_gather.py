"""A collective that gives every rank the vectors of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.request import (
    Exchange,
    ExchangeRequest,
    ExchangeWait,
    group_or_default,
    start_exchange,
)
from tessera.training.distributed.comm.transport import (
    Pending,
    start_all_gather,
    start_reduce_scatter,
)


@dataclass
class AllGatherBaseInfo(Exchange):
    """The layout of `all_gather_base_pooled`.

    Attributes:
        input_size: the shape of each rank's input.
        codecs: how numbers travel; None: as they are.
    """

    input_size: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def start(self, pg: dist.ProcessGroup, inputs: tuple[Tensor, ...]) -> Pending:
        """Send this rank's vectors, ``[B, D]``, to all ranks."""
        flat = inputs[0].contiguous().view(-1)
        return start_all_gather(pg, flat, self._lengths(pg), self.forward_codec)

    def finish(self, pg: dist.ProcessGroup, received: Tensor) -> Tensor:
        """Return the vectors ``[W * B, D]`` in rank order."""
        return received.view(pg.size() * self.input_size[0], *self.input_size[1:])

    def start_gradient(self, pg: dist.ProcessGroup, gradients: tuple[Tensor, ...]) -> Pending:
        """The gradients of each rank's part are added over ranks."""
        flat = gradients[0].contiguous().view(-1)
        return start_reduce_scatter(pg, flat, self._lengths(pg), self.backward_codec)

    def finish_gradient(self, pg: dist.ProcessGroup, received: Tensor) -> tuple[Tensor, ...]:
        """The gradient of this rank's vectors, ``[B, D]``."""
        del pg
        return (received.view(self.input_size),)

    def _lengths(self, pg: dist.ProcessGroup) -> list[int]:
        return [self.input_size.numel()] * pg.size()


class AllGatherBase_Req(ExchangeRequest):  # noqa: N801 - the reference's name
    """Starts `all_gather_base_pooled`."""


class AllGatherBase_Wait(ExchangeWait):  # noqa: N801 - the reference's name
    """Waits for `all_gather_base_pooled`."""


def all_gather_base_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Gather the ranks' tensors on every rank.

    Args:
        input: ``[B, ...]``, the same shape on every rank.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable of ``[W * B, ...]``, in rank order.
    """
    pg = group_or_default(group)
    if pg.size() == 1:
        return NoWait(input)
    info = AllGatherBaseInfo(input.size(), codecs)
    return start_exchange(pg, info, (input,), AllGatherBase_Req, AllGatherBase_Wait)
