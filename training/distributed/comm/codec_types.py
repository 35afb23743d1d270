"""What a codec of communication is: numbers made smaller before they travel.

The codecs themselves are made by `tessera.training.distributed.fbgemm_qcomm_codec`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

QuantizationContext = TypeVar("QuantizationContext")


@unique
class CommOp(Enum):
    """The collectives whose tensors a codec may shrink."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class QuantizedCommCodec(Generic[QuantizationContext]):
    """Encodes float32 tensors before a collective and decodes them behind it.

    This one leaves them as they are; a codec overrides what differs.

    A tensor of ``k * row_dim`` numbers may be encoded whole or row by row, with the same result;
    other lengths are filled up to whole rows.

    Attributes:
        row_dim: how many numbers are encoded together.
    """

    row_dim: int = 1

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """``input_tensor``, floating point of any shape, in the form that travels, flat."""
        del ctx
        return input_tensor.reshape(-1)

    def decode(self, input_grad: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The float32 numbers of what `encode` gave, flat; a row that was filled up is whole."""
        del ctx
        return input_grad

    def quantized_dtype(self) -> torch.dtype:
        """Return the dtype of the encoded numbers."""
        return torch.float32

    def calc_quantized_size(self, input_len: int, ctx: QuantizationContext | None = None) -> int:
        """How many entries of `quantized_dtype` ``input_len`` numbers become."""
        del ctx
        return input_len

    def padded_size(
        self,
        input_tensor: Tensor,
        dim_per_rank: list[int],
        my_rank: int,
        qcomm_ctx: QuantizationContext | None = None,
    ) -> tuple[int, int]:
        """How wide ``input_tensor``, ``[B, D]`` or flat, is to be before it is encoded, and how much of that is padding.

        Codecs fill rows up themselves, so the width is its own, and nothing of it is padding.
        """
        del dim_per_rank, my_rank, qcomm_ctx
        return input_tensor.shape[-1], 0

    def create_context(self) -> QuantizationContext | None:
        """What the encoding of one tensor and its decoding share, or None."""
        return None


class NoOpQuantizedCommCodec(QuantizedCommCodec[QuantizationContext]):
    """Sends numbers as they are."""


@dataclass
class QuantizedCommCodecs:
    """Holds the codecs of both directions.

    Attributes:
        forward: of the vectors.
        backward: of their gradients.
    """

    forward: QuantizedCommCodec[Any] = field(default_factory=NoOpQuantizedCommCodec)
    backward: QuantizedCommCodec[Any] = field(default_factory=NoOpQuantizedCommCodec)


def no_op_codecs_registry() -> dict[str, QuantizedCommCodecs]:
    """Return codecs that change nothing, by `CommOp` name."""
    return {comm_op.name: QuantizedCommCodecs() for comm_op in CommOp}
