"""Partial vectors are added over ranks; every rank gets the sums of its samples.

Its gradient is given to all ranks, which is a collective of its own too: the gathering of vectors.

The functions take ``group``, the ranks (None: the default group), and ``codecs``, how numbers travel
(None: as they are).  Legend: W ranks, B_r samples of rank r, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.request import (
    Exchange,
    group_or_default,
    start_exchange,
)
from tessera.training.distributed.comm.transport import (
    Codec,
    Pending,
    start_all_gather,
    start_reduce_scatter,
)


def _add_or_gather(
    pg: dist.ProcessGroup, flat: Tensor, shapes: list[torch.Size], codec: Codec | None, *, add: bool
) -> Pending:
    """Add pieces of these shapes over ranks, each for its rank, or give every rank all of them."""
    start = start_reduce_scatter if add else start_all_gather
    return start(pg, flat, [shape.numel() for shape in shapes], codec)


class _ReduceScatter(Exchange):
    """What the forms have in common: pieces in rank order, one output shape."""

    input_sizes: Any

    def send(self, flat: Tensor, codec: Codec | None, *, back: bool) -> Pending:
        """Add the pieces; backwards, send the gradient of this rank's piece to every rank."""
        return _add_or_gather(self.pg, flat, self.piece_shapes(), codec, add=not back)

    def finish(self, received: Tensor) -> Tensor:
        """Return this rank's piece of the sum."""
        return received.view(self.piece_shapes()[self.pg.rank()])

    def piece_shapes(self) -> list[torch.Size]:
        """Return the shape of each rank's output."""
        return list(self.input_sizes)


@dataclass
class ReduceScatterInfo(_ReduceScatter, steps=("ReduceScatter_Req", "ReduceScatter_Wait")):
    """The layout of `reduce_scatter_pooled`.

    Attributes:
        input_sizes: the shape of each input, one per rank.
        codecs: how numbers travel; None: as they are.
    """

    input_sizes: list[torch.Size]
    codecs: QuantizedCommCodecs | None = None


ReduceScatter_Req = ReduceScatterInfo.request
ReduceScatter_Wait = ReduceScatterInfo.wait


def reduce_scatter_pooled(
    inputs: list[Tensor],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors for each rank: ``inputs`` has ``[B_r, D]`` for each rank r.

    Returns:
        Awaitable of ``[B, D]``: the sum over ranks of what they had for this one.
    """
    info = ReduceScatterInfo([tensor.size() for tensor in inputs], codecs)
    return start_exchange(group, info, tuple(inputs))


@dataclass
class ReduceScatterBaseInfo(
    _ReduceScatter, steps=("ReduceScatterBase_Req", "ReduceScatterBase_Wait")
):
    """The layout of `reduce_scatter_base_pooled`.

    Attributes:
        input_sizes: the shape of the input.
        codecs: how numbers travel; None: as they are.
    """

    input_sizes: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def piece_shapes(self) -> list[torch.Size]:
        """Return the shapes of equal shares of the rows."""
        rows = self.input_sizes[0] // self.pg.size()
        return [torch.Size((rows, *self.input_sizes[1:]))] * self.pg.size()


ReduceScatterBase_Req = ReduceScatterBaseInfo.request
ReduceScatterBase_Wait = ReduceScatterBaseInfo.wait


def reduce_scatter_base_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors ``[W * B, D]``; every rank gets an equal share of the sum's rows.

    Returns:
        Awaitable of ``[B, D]``; the input's rows are in the order of their destinations.

    Raises:
        ValueError: rows that do not divide evenly among the ranks.
    """
    pg = group_or_default(group)
    if input.size(0) % pg.size():
        raise ValueError(
            f"input has {input.size(0)} rows, which do not divide evenly among {pg.size()} ranks;"
            " use reduce_scatter_v_pooled with input_splits"
        )
    info = ReduceScatterBaseInfo(input.size(), codecs)
    return start_exchange(pg, info, (input,))


@dataclass
class ReduceScatterVInfo(_ReduceScatter, steps=("ReduceScatterV_Req", "ReduceScatterV_Wait")):
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


ReduceScatterV_Req = ReduceScatterVInfo.request
ReduceScatterV_Wait = ReduceScatterVInfo.wait


def reduce_scatter_v_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    input_splits: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add the ranks' tensors; every rank gets its share of the sum's rows.

    ``input`` is ``[sum of input_splits, ...]``, rows in the order of their destinations;
    ``input_splits`` has the rows for each rank and is the same on all ranks.

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
    info = ReduceScatterVInfo(
        input_sizes=[torch.Size((rows, *input.shape[1:])) for rows in input_splits],
        input_splits=input_splits,
        equal_splits=len(set(input_splits)) == 1,
        total_input_size=list(input.shape),
        codecs=codecs,
    )
    return start_exchange(pg, info, (input,))


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,  # noqa: A002 - as in `reduce_scatter_v_pooled`
    batch_size_per_rank_per_feature: list[list[int]],
    embedding_dims: list[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Like `reduce_scatter_v_pooled`, where every feature has a batch size of its own.

    ``input`` is flat: per destination, per feature, its ``[B, D]`` block;
    ``batch_size_per_rank_per_feature`` is ``[W][F]`` samples, ``embedding_dims`` ``[F]`` columns.

    Returns:
        Awaitable, flat: per feature its ``[B, D]`` block.
    """
    splits = [
        sum(rows * columns for rows, columns in zip(batch, embedding_dims, strict=True))
        for batch in batch_size_per_rank_per_feature
    ]
    return reduce_scatter_v_pooled(input.view(-1), splits, group, codecs)


@dataclass
class AllGatherBaseInfo(Exchange, steps=("AllGatherBase_Req", "AllGatherBase_Wait")):
    """The layout of `all_gather_base_pooled`.

    Attributes:
        input_size: the shape of each rank's input.
        codecs: how numbers travel; None: as they are.
    """

    input_size: torch.Size
    codecs: QuantizedCommCodecs | None = None

    def send(self, flat: Tensor, codec: Codec | None, *, back: bool) -> Pending:
        """Send this rank's vectors to all; backwards, add the gradients of each rank's part."""
        return _add_or_gather(self.pg, flat, [self.input_size] * self.pg.size(), codec, add=back)

    def finish(self, received: Tensor) -> Tensor:
        """Return the vectors ``[W * B, D]`` in rank order."""
        return received.view(self.pg.size() * self.input_size[0], *self.input_size[1:])


AllGatherBase_Req = AllGatherBaseInfo.request
AllGatherBase_Wait = AllGatherBaseInfo.wait


def all_gather_base_pooled(
    input: Tensor,  # noqa: A002 - the reference's name
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Gather the ranks' tensors ``[B, ...]``, of the same shape on every rank, on every rank.

    Returns:
        Awaitable of ``[W * B, ...]``, in rank order.
    """
    info = AllGatherBaseInfo(input.size(), codecs)
    return start_exchange(group, info, (input,))
