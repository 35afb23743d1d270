"""The arithmetic between float32 rows and stored rows, for the records of `row_types`.

Shapes: ``R`` rows, ``D`` columns, ``S`` pairs of scale and bias.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.kernels.plan import BOOK_SCALES

BLOCK_COLUMNS = 16
"""Columns, and bytes, of a block of an int8b row."""
FLOAT8_MAX = 448.0
"""The largest number of e4m3fn."""

_FBGEMM_ROWS = "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf"
_HEADER_BYTES = 4
_CODE_COLUMNS = 4
_LARGEST_STEP = 127
# A block much smaller than the table's largest is stored with a coarser step than it could have:
# the scales of a book lie at most this factor apart end to end.
_LARGEST_SCALE_RANGE = 4096.0


def plain(stored: Tensor) -> Tensor:
    """A contiguous copy: of one row, ``contiguous()`` would keep a stride that ``view`` refuses."""
    return stored.clone(memory_format=torch.contiguous_format)


def cast_rows(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """``[R, D]`` rounded to ``dtype``, as bytes."""
    return weights.to(dtype).contiguous().view(torch.uint8).reshape(len(weights), -1)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Put codes side by side, the first in a byte's lowest bits.

    Args:
        codes: uint8 ``[R, D]``, each below ``2 ** bits``.
        bits: 1, 2, 4 or 8.

    Returns:
        uint8 ``[R, ceil(D * bits / 8)]``.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return codes.contiguous()
    full = pad(codes, (0, -codes.shape[1] % per_byte)).view(len(codes), -1, per_byte)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (full << shifts).sum(dim=2, dtype=torch.uint8)


def unpack_codes(data: Tensor, bits: int, dim: int) -> Tensor:
    """The codes of `pack_codes` as float32 ``[R, dim]``."""
    if bits == 8:
        return data[:, :dim].float()
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    parts = (data.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return parts.reshape(len(data), -1)[:, :dim].float()


def affine_codes(
    weights: Tensor, low: Tensor, high: Tensor, bits: int, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes with their scale and bias: an element is ``bias + scale * code``.

    The bias is the minimum, and the scale the range from the stored bias over the number of codes
    less one, both rounded to ``scale_dtype``.  A scale that rounds to zero is stored as 1.

    Args:
        weights: float32 ``[R, D]``.
        low: the minimum that each row's bias is made of, ``[R]``.
        high: the maximum, likewise.
        bits: of a code.
        scale_dtype: float16 or float32.

    Returns:
        The codes uint8 ``[R, D]``, and scale and bias ``[R, 2]`` of ``scale_dtype``.
    """
    levels = (1 << bits) - 1
    bias = low.to(scale_dtype)
    scale = ((high - bias.float()) / levels).to(scale_dtype)
    inverse = 1.0 / scale.float()
    lost = (scale == 0) | torch.isinf(inverse)
    scale = torch.where(lost, torch.ones_like(scale), scale)
    inverse = torch.where(lost, torch.ones_like(inverse), inverse)
    steps = (weights - bias.float().unsqueeze(1)) * inverse.unsqueeze(1)
    codes = steps.round().clamp(0, levels).to(torch.uint8)
    return codes, torch.stack([scale, bias], dim=1)


def affine_rows(weights: Tensor, bits: int) -> Tensor:
    """FBGEMM's rows: float16 scale, float16 bias, codes.  FBGEMM's operator makes them if loaded.

    Args:
        weights: float32 ``[R, D]``, within float16's range.
        bits: of a code: 2, 4 or 8.

    Returns:
        uint8 ``[R, 4 + D * bits / 8]``.
    """
    # Of 0.0 and -0.0 either may come out as the minimum, by the order of comparisons.
    weights = weights + 0.0
    if not hasattr(torch.ops.fbgemm, _FBGEMM_ROWS):
        return affine_rows_in_torch(weights, bits)
    # The operator wants codes that fill whole 16-bit words.  Repeating a row's last element
    # changes neither its minimum nor its maximum.
    dim = weights.shape[1]
    padded = pad(weights.unsqueeze(1), (0, -dim % (16 // bits)), mode="replicate").squeeze(1)
    fused = getattr(torch.ops.fbgemm, _FBGEMM_ROWS)(padded.contiguous(), bits)
    return torch.cat([fused[:, -_HEADER_BYTES:], fused[:, : dim * bits // 8]], dim=1)


def affine_rows_in_torch(weights: Tensor, bits: int) -> Tensor:
    """What `affine_rows` gives, without FBGEMM's operator."""
    codes, pairs = affine_codes(weights, weights.amin(1), weights.amax(1), bits, torch.float16)
    return torch.cat([pairs.view(torch.uint8), pack_codes(codes, bits)], dim=1)


def float8_codes(
    weights: Tensor, largest: Tensor, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """e4m3fn codes with the scale that maps ``largest`` to 448, and a bias of zero.

    Args:
        weights: float32 ``[R, D]``.
        largest: the magnitude that each row's scale is made of, ``[R]``.
        scale_dtype: float16 or float32.

    Returns:
        The codes as bytes ``[R, D]``, and scale and bias ``[R, 2]`` of ``scale_dtype``.
    """
    scale = (largest / FLOAT8_MAX).to(scale_dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    # The stored scale may be a little smaller than the exact one; stay inside the type.
    scaled = (weights / scale.float().unsqueeze(1)).clamp(-FLOAT8_MAX, FLOAT8_MAX)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, torch.stack([scale, torch.zeros_like(scale)], dim=1)


def float8_rows(weights: Tensor) -> Tensor:
    """Rows of type fp8, uint8 ``[R, 4 + D]``."""
    codes, pairs = float8_codes(weights, weights.abs().amax(1), torch.float16)
    return torch.cat([pairs.view(torch.uint8), codes], dim=1)


def block_scales(values: Tensor) -> Tensor:
    """The scale that each block of int8b rows needs at least.

    Args:
        values: float32 ``[R, D]``.

    Returns:
        float32 ``[R, ceil(D / 16)]``.
    """
    needed: Tensor = _blocks(values).abs().amax(dim=2) / _LARGEST_STEP
    return needed


def scale_book(largest: float, sample: Tensor) -> Tensor:
    """A table's book: 16 rising scales, evenly apart in logarithm.

    Args:
        largest: the largest scale that a block needs (`block_scales`).
        sample: the scales that blocks need, all of them or some: the book begins near the
            smallest, or at ``largest / 4096`` where that is more.

    Returns:
        float32 ``[16]``.
    """
    if not largest > 0:
        return torch.ones(BOOK_SCALES, device=sample.device)
    used = sample[sample > 0]
    smallest = float(used.kthvalue(1 + len(used) // 1000).values) if len(used) else largest
    smallest = max(smallest, largest / _LARGEST_SCALE_RANGE)
    powers = torch.linspace(0, 1, BOOK_SCALES, dtype=torch.float64, device=sample.device)
    book = (smallest * (largest / smallest) ** powers).float()
    book[-1] = largest
    return book


def block_rows(values: Tensor, book: Tensor) -> Tensor:
    """Rows of type int8b; each block takes the least scale of the book that holds it.

    Args:
        values: float32 ``[R, D]``.
        book: float32 ``[16]``, rising, the last one enough for every block.

    Returns:
        uint8 ``[R, D rounded up to 16]``.
    """
    blocks = _blocks(values)
    needed = blocks.abs().amax(dim=2) / _LARGEST_STEP
    code = torch.searchsorted(book, needed).clamp_(max=BOOK_SCALES - 1)
    steps = blocks / book[code][..., None]
    # Where a bit of the code is the lowest bit, every second step is left.
    bits = (code[..., None] >> torch.arange(_CODE_COLUMNS, device=values.device)) & 1
    head = (2 * torch.round((steps[..., :_CODE_COLUMNS] - bits) / 2) + bits).clamp(
        bits - _LARGEST_STEP - 1, _LARGEST_STEP - 1 + bits
    )
    tail = torch.round(steps[..., _CODE_COLUMNS:]).clamp(-_LARGEST_STEP, _LARGEST_STEP)
    return (torch.cat([head, tail], dim=2) + 128).to(torch.uint8).flatten(1)


def row_block_scales(data: Tensor, book: Tensor, dim: int) -> Tensor:
    """The scale of each column of int8b rows.

    Args:
        data: uint8 ``[R, dim rounded up to 16]``.
        book: float32 ``[16]``.
        dim: columns.

    Returns:
        float32 ``[R, dim]``.
    """
    blocks = data.reshape(len(data), -1, BLOCK_COLUMNS)
    powers = 1 << torch.arange(_CODE_COLUMNS, device=data.device)
    code = ((blocks[..., :_CODE_COLUMNS] & 1) * powers).sum(dim=2)
    scales: Tensor = book[code].unsqueeze(2).expand(-1, -1, BLOCK_COLUMNS).flatten(1)
    return scales[:, :dim]


def _blocks(values: Tensor) -> Tensor:
    padded = pad(values, (0, -values.shape[1] % BLOCK_COLUMNS))
    return padded.reshape(len(values), -1, BLOCK_COLUMNS)
