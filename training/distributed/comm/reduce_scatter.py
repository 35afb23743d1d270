"""Partial vectors are added over ranks; every rank gets the sums of its samples.

Legend: W ranks, B_r samples of rank r, D columns.
"""

from __future__ import annotations

from abc import abstractmethod
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


class _ReduceScatter(Exchange):
    """What the forms have in common: pieces in rank order, one output shape."""

    def start(self, pg: dist.ProcessGroup, inputs: tuple[Tensor, ...]) -> Pending:
        """Send the pieces, which lie in the order of their destinations."""
        if len(inputs) == 1:
            flat = inputs[0].contiguous().view(-1)
        else:
            flat = torch.cat([tensor.reshape(-1) for tensor in inputs])
        lengths = [shape.numel() for shape in self.piece_shapes(pg)]
        return start_reduce_scatter(pg, flat, lengths, self.forward_codec)

    def finish(self, pg: dist.ProcessGroup, received: Tensor) -> Tensor:
        """Return this rank's piece of the sum."""
        return received.view(self.piece_shapes(pg)[pg.rank()])

    def start_gradient(self, pg: dist.ProcessGroup, gradients: tuple[Tensor, ...]) -> Pending:
        """Send the gradient of this rank's piece to every rank."""
        lengths = [shape.numel() for shape in self.piece_shapes(pg)]
        flat = gradients[0].contiguous().view(-1)
        return start_all_gather(pg, flat, lengths, self.backward_codec)

    def finish_gradient(self, pg: dist.ProcessGroup, received: Tensor) -> tuple[Tensor, ...]:
        """Return one gradient for the whole input."""
        shapes = self.piece_shapes(pg)
        rows = sum(shape[0] for shape in shapes)
        return (received.view(rows, *shapes[0][1:]),)

    @abstractmethod
    def piece_shapes(self, pg: dist.ProcessGroup) -> list[torch.Size]:
        """Return the shape of each rank's output."""


@dataclass
class ReduceScatterInfo(_ReduceScatter):
    """The layout of `reduce_scatter_pooled`.

    Attributes:
        input_sizes: the shape of each input, one per rank.
        codecs: how numbers travel; None: as they are.
    """

    input_sizes: list[torch.Size]
    codecs: QuantizedCommCodecs | None = None

    def piece_shapes(self, pg: dist.ProcessGroup) -> list[torch.Size]:
        """Return the shapes of the inputs."""
        del pg
        return self.input_sizes

    def finish_gradient(self, pg: dist.ProcessGroup, received: Tensor) -> tuple[Tensor, ...]:
        """Return one gradient per input."""
        del pg
        parts = received.split_with_sizes([shape.numel() for shape in self.input_sizes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.input_sizes, strict=True))


class ReduceScatter_Req(ExchangeRequest):  # noqa: N801 - the reference's name
    """Starts `reduce_scatter_pooled`."""


class ReduceScatter_Wait(ExchangeWait):  # noqa: N801 - the reference's name
    """Waits for `reduce_scatter_pooled`."""


def reduce_scatter_pooled(
    inputs: list[Tensor],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors for each rank.

    Args:
        inputs: ``[B_r, D]`` for each rank r.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable of ``[B, D]``: the sum over ranks of what they had for this one.
    """
    pg = group_or_default(group)
    if pg.size() == 1:
        return NoWait(inputs[0])
    info = ReduceScatterInfo([tensor.size() for tensor in inputs], codecs)
    return start_exchange(pg, info, tuple(inputs), ReduceScatter_Req, ReduceScatter_Wait)


@dataclass
class ReduceScatterBaseInfo(_ReduceScatter):
    """The layout of `reduce_scatter_base_pooled`.

    Attributes:
        input_sizes: the shape of the input.
        codecs: how numbers travel; None: as they are.
    """

    input_sizes: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def piece_shapes(self, pg: dist.ProcessGroup) -> list[torch.Size]:
        """Return the shapes of equal shares of the rows."""
        rows = self.input_sizes[0] // pg.size()
        return [torch.Size((rows, *self.input_sizes[1:]))] * pg.size()


class ReduceScatterBase_Req(ExchangeRequest):  # noqa: N801 - the reference's name
    """Starts `reduce_scatter_base_pooled`."""


class ReduceScatterBase_Wait(ExchangeWait):  # noqa: N801 - the reference's name
    """Waits for `reduce_scatter_base_pooled`."""


def reduce_scatter_base_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors; every rank gets an equal share of the sum's rows.

    Args:
        input: ``[W * B, D]``, rows in the order of their destinations.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable of ``[B, D]``.

    Raises:
        ValueError: rows that do not divide evenly among the ranks.
    """
    pg = group_or_default(group)
    if input.size(0) % pg.size():
        raise ValueError(
            f"input has {input.size(0)} rows, which do not divide evenly among {pg.size()} ranks;"
            " use reduce_scatter_v_pooled with input_splits"
        )
    if pg.size() == 1:
        return NoWait(input)
    info = ReduceScatterBaseInfo(input.size(), codecs)
    return start_exchange(pg, info, (input,), ReduceScatterBase_Req, ReduceScatterBase_Wait)


@dataclass
class ReduceScatterVInfo(_ReduceScatter):
    """The layout of `reduce_scatter_v_pooled`.

    Attributes:
        input_sizes: the shape of each rank's piece of the input.
        input_splits: rows of each piece.
        equal_splits: whether all pieces have as many.
        total_input_size: the shape of the input.
        codecs: how numbers travel; None: as they are.
    """

    input_sizes: list[torch.Size]
    input_splits: list[int]
    equal_splits: bool
    total_input_size: list[int]
    codecs: QuantizedCommCodecs | None

    def piece_shapes(self, pg: dist.ProcessGroup) -> list[torch.Size]:
        """Return the shapes of the pieces of the input."""
        del pg
        return self.input_sizes


class ReduceScatterV_Req(ExchangeRequest):  # noqa: N801 - the reference's name
    """Starts `reduce_scatter_v_pooled`."""


class ReduceScatterV_Wait(ExchangeWait):  # noqa: N801 - the reference's name
    """Waits for `reduce_scatter_v_pooled`."""


def reduce_scatter_v_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    input_splits: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors; every rank gets its share of the sum's rows.

    Args:
        input: ``[sum of input_splits, ...]``, rows in the order of their destinations.
        input_splits: rows for each rank, the same on all ranks.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable of ``[input_splits[own rank], ...]``.

    Raises:
        ValueError: splits that do not add up to the rows.
    """
    pg = group_or_default(group)
    if sum(input_splits) != input.size(0) or len(input_splits) != pg.size():
        raise ValueError(
            f"input_splits {input_splits} must be one number per rank ({pg.size()}) and add up to"
            f" the input's {input.size(0)} rows"
        )
    if pg.size() == 1:
        return NoWait(input)
    info = ReduceScatterVInfo(
        input_sizes=[torch.Size((rows, *input.shape[1:])) for rows in input_splits],
        input_splits=input_splits,
        equal_splits=len(set(input_splits)) == 1,
        total_input_size=list(input.shape),
        codecs=codecs,
    )
    return start_exchange(pg, info, (input,), ReduceScatterV_Req, ReduceScatterV_Wait)


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,  # noqa: A002 - as in `reduce_scatter_v_pooled`
    batch_size_per_rank_per_feature: list[list[int]],
    embedding_dims: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Like `reduce_scatter_v_pooled`, where every feature has a batch size of its own.

    Args:
        input: flat: per destination, per feature, its ``[B, D]`` block.
        batch_size_per_rank_per_feature: ``[W][F]`` samples.
        embedding_dims: ``[F]`` columns.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable, flat: per feature its ``[B, D]`` block.
    """
    splits = [
        sum(rows * columns for rows, columns in zip(batch, embedding_dims, strict=True))
        for batch in batch_size_per_rank_per_feature
    ]
    return reduce_scatter_v_pooled(input.view(-1), splits, group, codecs)
