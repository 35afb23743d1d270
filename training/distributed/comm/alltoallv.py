"""All-to-all of several tensors, and of rows in splits of the caller's."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.alltoall_pooled import split_columns
from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.request import (
    AllToAll,
    group_or_default,
    start_exchange,
)


@dataclass
class All2AllVInfo(AllToAll, steps=("All2Allv_Req", "All2Allv_Wait")):
    """The layout of `alltoallv`.

    Attributes:
        dims_sum_per_rank: columns of each rank's tensors together.
        B_global: samples of all ranks.
        B_local: own samples.
        B_local_list: samples per rank.
        D_local_list: columns of each of this rank's tensors.
        input_split_sizes: numbers to each rank; worked out if empty.
        output_split_sizes: numbers from each rank; worked out if empty.
        codecs: how numbers travel; None: as they are.
    """

    dims_sum_per_rank: list[int]
    B_global: int
    B_local: int
    B_local_list: list[int]
    D_local_list: list[int]
    input_split_sizes: list[int] = field(default_factory=list)
    output_split_sizes: list[int] = field(default_factory=list)
    codecs: QuantizedCommCodecs | None = None

    def __post_init__(self) -> None:
        if not self.input_split_sizes:
            self.input_split_sizes = [rows * sum(self.D_local_list) for rows in self.B_local_list]
        if not self.output_split_sizes:
            self.output_split_sizes = [self.B_local * dims for dims in self.dims_sum_per_rank]

    def lay_out(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """``[B_global, D]`` each: put side by side, their rows lie in the destinations' order."""
        return torch.cat(inputs, dim=1).view(-1)

    def sizes(self) -> tuple[list[int], list[int]]:
        """Returns the numbers of elements that each rank sends and gets."""
        return self.input_split_sizes, self.output_split_sizes

    def finish(self, received: Tensor) -> tuple[Tensor, ...]:
        """One ``[B_local, columns of rank r]`` per rank."""
        parts = received.split_with_sizes(self.output_split_sizes)
        return tuple(
            # Clones: autograd refuses several outputs that are views of one buffer.
            part.view(self.B_local, dims).clone()
            for part, dims in zip(parts, self.dims_sum_per_rank, strict=True)
        )

    def finish_gradient(self, received: Tensor) -> tuple[Tensor, ...]:
        """Return one gradient ``[B_global, D]`` per input."""
        columns = split_columns(
            received.view(self.B_global, sum(self.D_local_list)), self.D_local_list
        )
        parts = columns.split_with_sizes([self.B_global * dim for dim in self.D_local_list])
        return tuple(
            part.view(self.B_global, dim)
            for part, dim in zip(parts, self.D_local_list, strict=True)
        )


All2Allv_Req = All2AllVInfo.request
All2Allv_Wait = All2AllVInfo.wait


def even_splits(total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` sizes that differ by one at most, the larger ones first."""
    size, rest = divmod(total, parts)
    return [size + (part < rest) for part in range(parts)]


def alltoallv(
    inputs: list[Tensor],
    out_split: list[int] | None = None,
    per_rank_split_lengths: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[list[Tensor]]:
    """Send every rank its samples' rows of several tensors.

    Args:
        inputs: ``[B_global, D_i]`` each; samples are dealt to the ranks as evenly as they go, the
            first ranks getting one more.
        out_split: columns that arrive from each rank.
        per_rank_split_lengths: tensors per rank, if all have as many columns as the first here;
            takes the place of ``out_split``.
        group: the ranks; None: the default group.
        codecs: how numbers travel; None: as they are.

    Returns:
        Awaitable of one ``[B_local, columns]`` per rank.

    Raises:
        ValueError: neither ``out_split`` nor ``per_rank_split_lengths``, or no inputs.
    """
    pg = group_or_default(group)
    if not inputs:
        raise ValueError("inputs is empty; give at least one tensor (it may have no columns)")
    dims = [tensor.size(1) for tensor in inputs]
    if out_split is None:
        if per_rank_split_lengths is None:
            raise ValueError("give out_split or per_rank_split_lengths: what arrives per rank")
        out_split = [count * dims[0] for count in per_rank_split_lengths]
    if pg.size() == 1:
        return NoWait([torch.cat(inputs, dim=1)])
    samples = inputs[0].size(0)
    shares = even_splits(samples, pg.size())
    info = All2AllVInfo(
        dims_sum_per_rank=out_split,
        B_global=samples,
        B_local=shares[pg.rank()],
        B_local_list=shares,
        D_local_list=dims,
        codecs=codecs,
    )
    request = start_exchange(pg, info, tuple(inputs))
    request.callbacks.append(list)
    return request


@dataclass
class All2AllDenseInfo(AllToAll, steps=("All2All_Dense_Req", "All2All_Dense_Wait")):
    """The layout of `alltoall_dense`.

    Attributes:
        output_splits: rows from each rank.
        batch_size: rows that arrive.
        input_shape: shape of the input.
        input_splits: rows to each rank.
    """

    output_splits: list[int]
    batch_size: int
    input_shape: list[int]
    input_splits: list[int]
    codecs = None

    def finish(self, received: Tensor) -> Tensor:
        """Return the rows in the order of their sources."""
        return received.view(self.batch_size, *self.input_shape[1:])

    def sizes(self) -> tuple[list[int], list[int]]:
        """Numbers of the rows."""
        width = torch.Size(self.input_shape[1:]).numel()
        return (
            [rows * width for rows in self.input_splits],
            [rows * width for rows in self.output_splits],
        )


All2All_Dense_Req = All2AllDenseInfo.request
All2All_Dense_Wait = All2AllDenseInfo.wait


def alltoall_dense(
    input: Tensor,  # noqa: A002 - named like its sisters'
    input_splits: list[int],
    output_splits: list[int],
    group: dist.ProcessGroup | None = None,
) -> Awaitable[Tensor]:
    """Send rows to other ranks.

    Args:
        input: ``[sum of input_splits, ...]``, rows in the order of their destinations.
        input_splits: rows to each rank.
        output_splits: rows from each rank.
        group: the ranks; None: the default group.

    Returns:
        Awaitable of ``[sum of output_splits, ...]``, rows in the order of their sources.
    """
    info = All2AllDenseInfo(output_splits, sum(output_splits), list(input.shape), input_splits)
    return start_exchange(group, info, (input,))
