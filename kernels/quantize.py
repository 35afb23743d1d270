"""Row-wise quantization of a float32 table to the weight types of `tessera.kernels.tables`.

``int8``/``int4`` are affine (value = scale * q + bias, q unsigned), ``fp8`` is e4m3fn with a
scale that maps the largest magnitude to 448, the others are casts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.tables import TableRows, WeightType

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
    per_table: bool = False,
) -> TableRows:
    """Store a table in another type.

    Args:
        values: float32 ``[R, D]``, finite.
        weight_type: the type of the result.
        scale_dtype: float16 or float32, for scale and bias.
        per_table: one scale and bias for the whole table instead of one per row.

    Returns:
        The rows.  The largest error of an element is half its scale, plus the rounding of the
        bias to ``scale_dtype`` (int8, int4).

    Raises:
        UserError: ``values`` is not a finite float32 matrix, or ``scale_dtype`` is another.
    """
    if values.dtype != torch.float32 or values.dim() != 2 or values.numel() == 0:
        raise UserError(
            f"values: a non-empty float32 matrix is needed, got {values.dtype} {list(values.shape)}"
        )
    if not bool(torch.isfinite(values).all()):
        raise UserError("values: the table holds NaN or infinity, which no row can scale")
    if scale_dtype not in (torch.float16, torch.float32):
        raise UserError(f"scale_dtype: float16 or float32 is needed, got {scale_dtype}")
    dim = int(values.shape[1])
    if weight_type in _CASTS:
        data = values.to(_CASTS[weight_type]).contiguous().view(torch.uint8)
        return TableRows(data=data, weight_type=weight_type, dim=dim)
    source = values.reshape(1, -1) if per_table else values
    if weight_type is WeightType.FLOAT8:
        scale = source.abs().amax(dim=1, keepdim=True) / _FLOAT8_MAX
        scale = _usable_scale(scale, scale_dtype)
        # The stored scale may be a little smaller than the exact one; stay inside the type.
        scaled = (values / scale.float()).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
        data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        return TableRows(
            data=data,
            weight_type=weight_type,
            dim=dim,
            scale=torch.cat([scale, torch.zeros_like(scale)], dim=1),
        )
    levels = 255 if weight_type is WeightType.INT8 else 15
    bias = source.amin(dim=1, keepdim=True).to(scale_dtype)
    spread = source.amax(dim=1, keepdim=True) - bias.float()
    scale = _usable_scale(spread / levels, scale_dtype)
    q = torch.round((values - bias.float()) / scale.float()).clamp(0, levels).to(torch.uint8)
    if weight_type is WeightType.INT4:
        q = _pack_halves(q)
    return TableRows(
        data=q.contiguous(),
        weight_type=weight_type,
        dim=dim,
        scale=torch.cat([scale, bias], dim=1),
    )


def _usable_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as stored; one where it would be zero, since nothing is left to scale."""
    stored = scale.to(dtype)
    return torch.where(stored > 0, stored, torch.ones_like(stored))


def _pack_halves(q: Tensor) -> Tensor:
    """uint8 ``[R, D]`` of values under 16 to ``[R, ceil(D / 2)]``, the even column low."""
    if q.shape[1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))
    return q[:, 0::2] | (q[:, 1::2] << 4)
