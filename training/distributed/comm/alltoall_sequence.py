"""One vector per id travels back along the way that the id came.

Legend: W ranks, N ids that arrived here, D columns, S = features * W segments of ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.request import (
    AllToAll,
    group_or_default,
    start_exchange,
)


def segment_order(lengths: Tensor, permute: Tensor, total: int) -> Tensor:
    """Where the rows of permuted segments come from.

    Args:
        lengths: ``[S]`` rows per segment, before.
        permute: ``[S]``: the segments' new order.
        total: their sum, known to the host (no wait for the device).

    Returns:
        ``[total]`` int64: row ``i`` afterwards was row ``order[i]`` before.
    """
    lengths = lengths.long()
    ends = lengths.cumsum(0)
    permute = permute.long()
    sizes = lengths[permute]
    # Rows of one segment move by one distance.
    moves = (ends - lengths)[permute] - (sizes.cumsum(0) - sizes)
    order = torch.arange(total, device=lengths.device)
    return order + torch.repeat_interleave(moves, sizes, output_size=total)


@dataclass
class All2AllSequenceInfo(AllToAll, steps=("All2All_Seq_Req", "All2All_Seq_Req_Wait")):
    """The layout of `alltoall_sequence`.

    Attributes:
        embedding_dim: D.
        lengths_after_sparse_data_all2all: ids per feature and sample of the input, feature-major:
            its entries divide evenly among the segments, or with ``variable_batch_size`` are the
            segments' sums themselves.
        forward_recat_tensor: ``[S]``: the segments (feature, source) of the input in the order
            (source, feature); None: they lie in it already.
        backward_recat_tensor: ``[S]``: its inverse.
        input_splits: ids that went to each rank, so vectors that come from it.
        output_splits: ids that came from each rank, so vectors that go to it.
        variable_batch_size: the ranks' batches have different sizes.
        codecs: how numbers travel; None: as they are.
        permuted_lengths_after_sparse_data_all2all: ids per segment in the order (source,
            feature); filled in by the forward pass.
    """

    embedding_dim: int
    lengths_after_sparse_data_all2all: Tensor
    forward_recat_tensor: Tensor | None
    backward_recat_tensor: Tensor
    input_splits: list[int]
    output_splits: list[int]
    variable_batch_size: bool = False
    codecs: QuantizedCommCodecs | None = None
    permuted_lengths_after_sparse_data_all2all: Tensor | None = None
    _order: Tensor | None = field(default=None, repr=False)

    def lay_out(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """``[N, D]`` in the order (feature, source, sample), by source; flat."""
        vectors = inputs[0]
        if self.forward_recat_tensor is not None:
            segments = self._segments()
            permute = self.forward_recat_tensor
            self.permuted_lengths_after_sparse_data_all2all = segments[permute.long()]
            self._order = segment_order(segments, permute, vectors.size(0))
            vectors = vectors.index_select(0, self._order)
        return vectors.contiguous().view(-1)

    def finish(self, received: Tensor) -> Tensor:
        """``[N', D]``, in the order in which this rank sent its ids."""
        return received.view(-1, self.embedding_dim)

    def finish_gradient(self, received: Tensor) -> tuple[Tensor, ...]:
        """The gradient of the vectors looked up here, ``[N, D]``."""
        gradient = received.view(-1, self.embedding_dim)
        if self._order is None:
            return (gradient,)
        return (torch.empty_like(gradient).index_copy_(0, self._order, gradient),)

    def _segments(self) -> Tensor:
        lengths = self.lengths_after_sparse_data_all2all.view(-1)
        segments = self.backward_recat_tensor.numel()
        if segments == 0 or lengths.numel() == segments:
            return lengths
        return lengths.view(segments, -1).sum(dim=1)

    def sizes(self) -> tuple[list[int], list[int]]:
        """Vectors go against the way of the ids."""
        return (
            [rows * self.embedding_dim for rows in self.output_splits],
            [rows * self.embedding_dim for rows in self.input_splits],
        )


All2All_Seq_Req = All2AllSequenceInfo.request
All2All_Seq_Req_Wait = All2AllSequenceInfo.wait


def alltoall_sequence(  # noqa: PLR0917 - the reference's signature
    a2a_sequence_embs_tensor: Tensor,
    forward_recat_tensor: Tensor | None,
    backward_recat_tensor: Tensor,
    lengths_after_sparse_data_all2all: Tensor,
    input_splits: list[int],
    output_splits: list[int],
    variable_batch_size: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Send the vector of every id to the rank that asked for it.  All have D columns.

    ``a2a_sequence_embs_tensor`` is ``[N, D]`` in the order (feature, source, sample), ``group`` the
    ranks (None: the default group); the other arguments are those of `All2AllSequenceInfo`.

    Returns:
        Awaitable of ``[sum of input_splits, D]``, in the order in which the ids were sent.

    Raises:
        ValueError: with ``variable_batch_size``, lengths that are not one per segment.
    """
    pg = group_or_default(group)
    if pg.size() == 1:
        return NoWait(a2a_sequence_embs_tensor)
    segments = backward_recat_tensor.numel()
    if variable_batch_size and lengths_after_sparse_data_all2all.numel() != segments:
        raise ValueError(
            f"lengths_after_sparse_data_all2all has {lengths_after_sparse_data_all2all.numel()}"
            f" entries; with variable_batch_size give the ids of each of the {segments} segments"
        )
    info = All2AllSequenceInfo(
        a2a_sequence_embs_tensor.size(1),
        lengths_after_sparse_data_all2all,
        forward_recat_tensor,
        backward_recat_tensor,
        input_splits,
        output_splits,
        variable_batch_size,
        codecs,
    )
    return start_exchange(pg, info, (a2a_sequence_embs_tensor,))
