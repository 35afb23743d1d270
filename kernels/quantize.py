"""Row-wise quantization of a float32 table to the weight types of `tessera.kernels.tables`.

``int8``/``int4`` are affine (value = scale * q + bias, q unsigned), ``fp8`` is e4m3fn with a
scale that maps the largest magnitude to 448, ``block int8`` has a scale per 16 columns, chosen
among 16 of the table, and the others are casts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.tables import (
    BLOCK_COLUMNS,
    BOOK_SCALES,
    TABLE_SCALE_SHIFT,
    TableRows,
    WeightType,
)

_FLOAT8_MAX = 448.0
_CASTS = {
    WeightType.FLOAT32: torch.float32,
    WeightType.FLOAT16: torch.float16,
    WeightType.BFLOAT16: torch.bfloat16,
}


def quantize_table(
    values: Tensor,
    weight_type: WeightType,
    *,
    scale_dtype: torch.dtype = torch.float16,
    scale_shift: int = 0,
) -> TableRows:
    """Store a table in another type.

    Args:
        values: float32 ``[R, D]``, finite.
        weight_type: the type of the result.
        scale_dtype: float16 or float32, for scale and bias.
        scale_shift: one scale and bias per ``2**scale_shift`` neighbouring rows; 0: per row;
            `tables.TABLE_SCALE_SHIFT`: per table.  A GPU reads a row of a large table faster when
            the scales fit its cache.

    Returns:
        The rows.  The largest error of an element is half its scale, plus the rounding of the
        bias to ``scale_dtype`` (int8, int4).  BLOCK_INT8 takes neither ``scale_dtype`` nor
        ``scale_shift``; its largest error is half the block's scale, and one scale in the four
        columns of a block whose lowest bits hold the code.

    Raises:
        UserError: ``values`` is not a finite float32 matrix or too large for ``scale_dtype``, or
            another argument is out of its range.
    """
    if values.dtype != torch.float32 or values.dim() != 2 or values.numel() == 0:
        raise UserError(
            f"values: a non-empty float32 matrix is needed, got {values.dtype} {list(values.shape)}"
        )
    if not bool(torch.isfinite(values).all()):
        raise UserError("values: the table holds NaN or infinity, which no row can scale")
    if scale_dtype not in (torch.float16, torch.float32):
        raise UserError(f"scale_dtype: float16 or float32 is needed, got {scale_dtype}")
    rows, dim = values.shape
    if weight_type in _CASTS:
        data = values.to(_CASTS[weight_type]).contiguous().view(torch.uint8)
        return TableRows(data=data, weight_type=weight_type, dim=dim)
    if weight_type is WeightType.BLOCK_INT8:
        needed = block_scales(values)
        book = scale_book(float(needed.max()), needed)
        data = quantize_blocks(values, book)
        return TableRows(data=data, weight_type=weight_type, dim=dim, scale=book)
    if not 0 <= scale_shift <= TABLE_SCALE_SHIFT:
        raise UserError(f"scale_shift: {scale_shift} is not in 0 to {TABLE_SCALE_SHIFT}")
    group_of_row = torch.arange(rows, device=values.device) >> scale_shift
    low = _by_group(values.amin(dim=1), group_of_row, "amin")
    high = _by_group(values.amax(dim=1), group_of_row, "amax")
    if weight_type is WeightType.FLOAT8:
        largest = torch.maximum(low.abs(), high.abs())
        scale = _usable_scale(largest / _FLOAT8_MAX, scale_dtype)
        # The stored scale may be a little smaller than the exact one; stay inside the type.
        scaled = values / scale.float()[group_of_row, None]
        data = scaled.clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return TableRows(
            data=data,
            weight_type=weight_type,
            dim=dim,
            scale=torch.stack([scale, torch.zeros_like(scale)], dim=1),
            scale_shift=scale_shift,
        )
    levels = 255 if weight_type is WeightType.INT8 else 15
    bias = _stored(low, scale_dtype)
    scale = _usable_scale((high - bias.float()) / levels, scale_dtype)
    steps = (values - bias.float()[group_of_row, None]) / scale.float()[group_of_row, None]
    q = torch.round(steps).clamp(0, levels).to(torch.uint8)
    if weight_type is WeightType.INT4:
        q = _pack_halves(q)
    return TableRows(
        data=q.contiguous(),
        weight_type=weight_type,
        dim=dim,
        scale=torch.stack([scale, bias], dim=1),
        scale_shift=scale_shift,
    )


_CODE_COLUMNS = 4
_LARGEST_STEP = 127
# A block much smaller than the table's largest is stored with a coarser step than it could have:
# the scales of a book lie at most this factor apart end to end.
_LARGEST_SCALE_RANGE = 4096.0


def block_scales(values: Tensor) -> Tensor:
    """The scale that each block of BLOCK_INT8 rows needs at least.

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


def quantize_blocks(values: Tensor, book: Tensor) -> Tensor:
    """BLOCK_INT8 rows; each block takes the least scale of the book that holds it.

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


def dequantize_blocks(data: Tensor, book: Tensor, dim: int) -> Tensor:
    """The values of BLOCK_INT8 rows, as the lookups see them.

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
    values: Tensor = (blocks.float() - 128) * book[code][..., None]
    return values.flatten(1)[:, :dim]


def _blocks(values: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % BLOCK_COLUMNS))
    return padded.reshape(len(values), -1, BLOCK_COLUMNS)


def _by_group(per_row: Tensor, group_of_row: Tensor, reduce: str) -> Tensor:
    """The least or largest of each group of rows: ``[S]``."""
    groups = int(group_of_row[-1]) + 1
    return per_row.new_zeros(groups).scatter_reduce(
        0, group_of_row, per_row, reduce=reduce, include_self=False
    )


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    stored = values.to(dtype)
    if not bool(torch.isfinite(stored).all()):
        raise UserError(
            f"values: up to {float(values.abs().max()):g}, too large for scales of {dtype}; give "
            "scale_dtype=torch.float32"
        )
    return stored


def _usable_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as stored; one where it would be zero, since nothing is left to scale."""
    stored = _stored(scale, dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def _pack_halves(q: Tensor) -> Tensor:
    """uint8 ``[R, D]`` of values under 16 to ``[R, ceil(D / 2)]``, the even column low."""
    if q.shape[1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))
    return q[:, 0::2] | (q[:, 1::2] << 4)
