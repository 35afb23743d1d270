"""The pairwise dot products of DLRM, with a backward of one batched product.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems" (2019), section 2.1.4.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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
