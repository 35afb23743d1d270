"""The pairwise dot products of DLRM, with a backward of one batched product.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019), section 2.1.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tessera.kernels import ops
from tessera.training.sparse.checks import is_traced

_NARROW = (torch.bfloat16, torch.float16)
_WHOLE = 8


class _PairDots(torch.autograd.Function):
    """Pairs of ``x x^T`` below the diagonal.

    Matrices of 16-bit numbers are given rows of zeros up to a multiple of 8: a GPU multiplies others several
    times as slowly.

    Autograd's own way would scatter the pairs' gradients into a zeroed ``[B, F, F]`` and
    multiply twice.  The gradient of a symmetric product is symmetric, so one gather builds
    ``G + G^T`` and one product finishes.
    """

    @staticmethod
    def forward(ctx: Any, x_BFD: Tensor, pairs_P: Tensor, places_FF: Tensor) -> Tensor:
        features = ctx.features = x_BFD.size(1)
        if x_BFD.dtype in _NARROW and features % _WHOLE:
            x_BFD = nn.functional.pad(x_BFD, (0, 0, 0, -features % _WHOLE))
            padded = x_BFD.size(1)
            pairs_P = pairs_P // features * padded + pairs_P % features
            added = (0, padded - features)
            places = places_FF.view(features, features)
            # Behind the last pair is a zero.
            places_FF = nn.functional.pad(places, added * 2, value=pairs_P.numel()).flatten()
        ctx.save_for_backward(x_BFD, places_FF)
        return _pair_dots(x_BFD, pairs_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        x_BFD, places_FF = ctx.saved_tensors
        (grad_BP,) = grads
        features = x_BFD.size(1)
        # Column P is the diagonal's zero.  Under autocast the pairs are narrower than ``x``.
        padded = nn.functional.pad(grad_BP.to(x_BFD.dtype), (0, 1))
        symmetric_BFF = padded.index_select(1, places_FF).view(-1, features, features)
        return torch.bmm(symmetric_BFF, x_BFD)[:, : ctx.features], None, None


def _pair_dots(x_BFD: Tensor, pairs_P: Tensor) -> Tensor:
    return torch.bmm(x_BFD, x_BFD.transpose(1, 2)).flatten(1).index_select(1, pairs_P)


MOST_VECTORS, MOST_COLUMNS = 31, 4096
"""Looked-up vectors of a sample, and numbers of each, that `NarrowInteraction` takes."""


class NarrowInteraction(torch.autograd.Function):
    """The dense vector and the pairs' products of bfloat16 vectors by a kernel, and their gradients by another.

    On a GPU the vectors are read once in each direction, and nothing else is written than what is asked for;
    torch's own operators read and write all of them some ten times, to join them, to lay them out for the product and
    to take its gradient apart.

    ``apply(dense [B, D], sparse [B, F, D]) -> [B, D + F (F + 1) / 2]``, the pairs as `DotInteraction` has them.
    """

    @staticmethod
    def forward(ctx: Any, dense: Tensor, sparse: Tensor) -> Tensor:
        """See the class."""
        dense, flat = _in_place(dense), _in_place(sparse.flatten(1))
        ctx.save_for_backward(dense, flat)
        found: Tensor = torch.ops.tessera.dot_interaction_bf16(dense, flat)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what `forward` was given."""
        dense, flat = ctx.saved_tensors
        own, others = torch.ops.tessera.dot_interaction_bf16_backward(
            _in_place(grads[0]), dense, flat
        )
        return own, others.view(len(dense), -1, dense.size(1))

    @staticmethod
    def takes(dense: Tensor, sparse: Tensor) -> bool:
        """Whether it takes vectors of this type, number and size, on their device, and it is a GPU."""
        return (
            dense.dtype == sparse.dtype == torch.bfloat16
            and dense.is_cuda
            and 1 <= sparse.size(1) <= MOST_VECTORS
            and dense.size(1) == sparse.size(2) <= MOST_COLUMNS
            and dense.size(1) % _WHOLE == 0
            and ops.trains_on_gpus()
        )


def _in_place(tensor: Tensor) -> Tensor:
    """``tensor`` as kernels read it: contiguous, from a multiple of 16 bytes on."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


class DotInteraction(nn.Module):
    """Dot products of all pairs of ``F`` vectors.

    The pairs are those below the diagonal, row by row: (1, 0), (2, 0), (2, 1), (3, 0), ...

    Args:
        features: ``F``.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.pairs_P: Tensor
        self.places_FF: Tensor
        lower = torch.tril_indices(features, features, offset=-1)
        pairs = lower[0] * features + lower[1]
        count = pairs.numel()
        places = torch.full((features, features), count, dtype=torch.int64)
        places[lower[0], lower[1]] = torch.arange(count)
        places[lower[1], lower[0]] = torch.arange(count)
        self.register_buffer("pairs_P", pairs, persistent=False)
        self.register_buffer("places_FF", places.flatten(), persistent=False)

    def forward(self, x_BFD: Tensor) -> Tensor:
        """``[B, F, D]`` to ``[B, F * (F - 1) / 2]``."""
        if not is_traced(x_BFD) and x_BFD.requires_grad:
            dots: Tensor = _PairDots.apply(x_BFD, self.pairs_P, self.places_FF)  # type: ignore[no-untyped-call] # torch leaves apply untyped
            return dots
        return _pair_dots(x_BFD, self.pairs_P)
