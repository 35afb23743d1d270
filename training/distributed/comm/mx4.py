"""Numbers of four bits in groups with one exponent: MX4, as the Open Compute Project's "Microscaling Formats (MX)" has it.

A group of ``k`` numbers is ``k / 2 + 1`` bytes: two codes to a byte, the first number's in the low half, and
behind them the exponent E that the group shares, as ``E + 127``.  A code is a sign and one of the sizes in
`SIZES` (E2M1: two bits of exponent, one of mantissa); the number is ``size * 2**E``.  These are the bytes of FBGEMM's
``fp32_to_mx4``.  Numbers halfway between two sizes go to the larger, and those beyond the largest to it.

E follows from the group's largest number; `THRESHOLDS` says when it is one more than that number's own
exponent asks for.  A group that has a number that is not finite has the exponent byte 255, and all of it is NaN behind.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDDLES = tuple((low + high) / 2 for low, high in itertools.pairwise(SIZES))
_BIAS, _NOT_FINITE, _SIGN = 127, 255, 8
_LEAST, _MOST = -127, 125  # of the shared exponent
# The mode's number in FBGEMM's `RoundingMode` -> the mantissa, from 0.5 to 1, of the largest number from which
# on E is one more: to the nearest power of two, never, where one bit of mantissa rounds up, for all but powers.
THRESHOLDS = {0: 0.5**0.5, 1: 1.0, 2: 0.875, 4: 0.5 + 2**-24}
EVEN, STOCHASTIC = 2, 3


def _shared_exponents(rows: Tensor, mode: int) -> Tensor:
    """``[n, k]`` float32 to ``[n, 1]`` int32: E of each group."""
    largest = rows.abs().amax(dim=1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
    mantissa, exponent = torch.frexp(largest)
    if mode == STOCHASTIC:  # as likely as the bits that are dropped are large
        up = mantissa + torch.rand_like(mantissa).mul_(0.25) >= 1
    else:
        up = mantissa >= THRESHOLDS[mode]
    # A mantissa from 1 to 2 would have one less, and the largest size is a number of 2**2.
    return (exponent - 3 + up).clamp_(_LEAST, _MOST)


def encode(rows: Tensor, mode: int = EVEN) -> Tensor:
    """Encodes groups.

    Args:
        rows: ``[n, k]`` float32, ``k`` even.
        mode: the number of FBGEMM's rounding mode for the shared exponent.

    Returns:
        ``[n, k / 2 + 1]`` uint8.
    """
    finite = rows.isfinite().all(dim=1, keepdim=True)
    rows = torch.where(finite, rows, 0.0)
    exponents = _shared_exponents(rows, mode)
    scaled = torch.ldexp(rows, -exponents)
    middles = torch.tensor(_MIDDLES, device=rows.device)
    codes = torch.bucketize(scaled.abs(), middles, right=True).to(torch.uint8)
    codes += scaled.signbit().to(torch.uint8) * _SIGN
    packed = codes[:, ::2] + codes[:, 1::2] * 16
    exponent_bytes = torch.where(finite, exponents + _BIAS, _NOT_FINITE).to(torch.uint8)
    return torch.cat([packed, exponent_bytes], dim=1)


def decode(groups: Tensor) -> Tensor:
    """Decodes what `encode` gave: ``[n, k / 2 + 1]`` uint8 to ``[n, k]`` float32."""
    packed, exponent_bytes = groups[:, :-1], groups[:, -1:].to(torch.int32)
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
    numbers = torch.tensor([*SIZES, *(-size for size in SIZES)], device=groups.device)
    decoded = torch.ldexp(numbers[codes.to(torch.int32)], exponent_bytes - _BIAS)
    return decoded.masked_fill_(exponent_bytes == _NOT_FINITE, torch.nan)
