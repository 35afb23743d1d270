"""The three collectives that everything is made of, on flat tensors, started and then awaited.

Numbers may be encoded on the way.  A piece is what one rank sends to another; it is encoded on
its own, so that the receiver can decode it without knowing the sender's other pieces.

A sum over ranks is an all-to-all followed by a sum in rank order, except on CUDA without codecs,
where NCCL reduces on the way.  It moves as many bytes, adds decoded numbers in float32, allows
pieces of different sizes, and on the CPU always gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.codec_types import NoOpQuantizedCommCodec, QuantizedCommCodec
from tessera.training.distributed.comm.in_flight import kept

Codec = QuantizedCommCodec[Any]

# torch 2.13 has new names for these and warns of the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


class Pending:
    """Waits for a collective that was started; keeps what it reads alive until it is done.

    On a GPU the stream that waits need not be the one on which the tensors were made: pipelines run lookups, and
    so the backward passes of their tables, on a stream of their own.  The memory of both tensors is kept until
    the waiting stream is done with it, as the allocator would give it to the stream that made it at once.
    """

    def __init__(
        self,
        work: dist.Work,
        received: Tensor,
        kept: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._work = work
        self._received = received
        self._kept: Tensor | None = kept
        self._finish = finish

    def wait(self) -> Tensor:
        """The result, flat; on a GPU the current stream waits, the host does not."""
        self._work.wait()
        for tensor in (self._received, self._kept):
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        self._kept = None
        return self._received if self._finish is None else self._finish(self._received)

    def then(self, function: Callable[[Tensor], Tensor]) -> Pending:
        """The same collective, whose result ``function`` is applied to."""
        before = self._finish
        after = function if before is None else lambda received: function(before(received))
        assert self._kept is not None, "nobody has waited yet"
        return Pending(self._work, self._received, self._kept, after)


def _shrinking(codec: Codec | None) -> Codec | None:
    """``codec``; None if it leaves numbers as they are."""
    plain = type(codec) in {QuantizedCommCodec, NoOpQuantizedCommCodec}
    return None if plain else codec


def _decoder(
    codec: Codec | None, lengths: Sequence[int], dtype: torch.dtype
) -> Callable[[Tensor], Tensor] | None:
    if codec is None:
        return None
    return lambda encoded: decode_pieces(codec, encoded, lengths, dtype)


def encode_pieces(codec: Codec, flat: Tensor, lengths: Sequence[int]) -> Tensor:
    """Encode consecutive pieces of ``flat``, each for itself, into one flat tensor."""
    if all(length % codec.row_dim == 0 for length in lengths):
        return codec.encode(flat).view(-1)
    return torch.cat(
        [codec.encode(piece).view(-1) for piece in flat.split_with_sizes(list(lengths))]
    )


def decode_pieces(
    codec: Codec, encoded: Tensor, lengths: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Undo `encode_pieces`: ``[sum of lengths]`` of ``dtype``."""
    if all(length % codec.row_dim == 0 for length in lengths):
        return codec.decode(encoded).view(-1).to(dtype)
    sizes = [codec.calc_quantized_size(length) for length in lengths]
    pieces = [
        codec.decode(piece).view(-1)[:length]
        for piece, length in zip(encoded.split_with_sizes(sizes), lengths, strict=True)
    ]
    return torch.cat(pieces).to(dtype)


def start_all_to_all(
    pg: dist.ProcessGroup,
    flat: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    codec: Codec | None = None,
) -> Pending:
    """Send piece ``r`` of ``flat`` to rank ``r``.

    ``flat`` is ``[sum of send]``, contiguous, with the numbers per destination; the result is
    ``[sum of receive]``, in the order of the sources.
    """
    codec = _shrinking(codec)

    def travelling(lengths: Sequence[int]) -> list[int]:
        return list(lengths) if codec is None else list(map(codec.calc_quantized_size, lengths))

    sent = flat if codec is None else encode_pieces(codec, flat, send)
    sizes = travelling(receive)
    received = sent.new_empty(sum(sizes))
    work = dist.all_to_all_single(received, sent, sizes, travelling(send), group=pg, async_op=True)
    return Pending(kept(work, sent), received, sent, _decoder(codec, receive, flat.dtype))


def start_reduce_scatter(
    pg: dist.ProcessGroup, flat: Tensor, lengths: Sequence[int], codec: Codec | None = None
) -> Pending:
    """Sum over ranks; rank ``r`` gets piece ``r`` of the sum.

    ``flat`` is ``[sum of lengths]``, contiguous, with the same sizes on every rank; the result is
    ``[lengths[own rank]]``.  What was encoded is summed in float32.
    """
    own = lengths[pg.rank()]
    if flat.is_cuda and _shrinking(codec) is None and len(set(lengths)) == 1:
        received = flat.new_empty(own)
        work = _reduce_scatter(received, flat, group=pg, async_op=True)
        return Pending(work, received, flat)
    pending = start_all_to_all(pg, flat, lengths, [own] * pg.size(), codec)
    dtype = flat.dtype
    return pending.then(lambda parts: _sum_parts(parts.view(pg.size(), own), dtype))


def start_all_gather(
    pg: dist.ProcessGroup, flat: Tensor, lengths: Sequence[int], codec: Codec | None = None
) -> Pending:
    """Give every rank every rank's numbers.

    ``flat`` is ``[lengths[own rank]]``, contiguous; the result is ``[sum of lengths]``, in rank order.
    """
    if len(set(lengths)) > 1:
        copies = flat.repeat(pg.size())
        return start_all_to_all(pg, copies, [flat.numel()] * pg.size(), lengths, codec)
    codec = _shrinking(codec)
    sent = flat if codec is None else codec.encode(flat).view(-1)
    received = sent.new_empty(sent.numel() * pg.size())
    work = _all_gather(received, sent, group=pg, async_op=True)
    return Pending(kept(work, sent), received, sent, _decoder(codec, lengths, flat.dtype))


def _sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """``[W, n]`` to ``[n]``, in rank order; 16-bit numbers are added in float32."""
    if parts.size(0) == 2 and dtype == torch.float32:  # the same, without a reduction's overhead
        return parts[0].add_(parts[1])
    return parts.sum(dim=0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
