"""Tables whose rows share scales, or have scales of another type than their row type's own.

A row type's own rows are made by `tessera.kernels.row_types.RowType.encode`; the kernels also read
float32 scales, one scale for several rows, and one for the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.kernels.plan import ScaleType
from tessera.kernels.row_codecs import affine_codes, float8_codes, pack_codes
from tessera.kernels.row_types import FLOAT8, RowType
from tessera.kernels.tables import TABLE_SCALE_SHIFT, TableRows


def quantize_table(
    values: Tensor,
    weight_type: RowType,
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
        bias to ``scale_dtype`` (int8, int4).  Types without a scale per row take neither
        ``scale_dtype`` nor ``scale_shift``; int8b's largest error is half the block's scale, and
        one scale in the four columns of a block whose lowest bits hold the code.

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
    if weight_type.scale is not ScaleType.FLOAT16:
        kind = weight_type.fitted([values])
        return TableRows(data=kind.encode(values), weight_type=kind, dim=dim, scale=kind.book)
    if not 0 <= scale_shift <= TABLE_SCALE_SHIFT:
        raise UserError(f"scale_shift: {scale_shift} is not in 0 to {TABLE_SCALE_SHIFT}")
    group_of_row = torch.arange(rows, device=values.device) >> scale_shift
    low = _by_group(values.amin(dim=1), group_of_row, "amin")
    high = _by_group(values.amax(dim=1), group_of_row, "amax")
    if weight_type.kernel_number == FLOAT8.kernel_number:
        codes, pairs = float8_codes(values, torch.maximum(low.abs(), high.abs()), scale_dtype)
    else:
        codes, pairs = affine_codes(values, low, high, weight_type.bits, scale_dtype)
        codes = pack_codes(codes, weight_type.bits)
    if not bool(torch.isfinite(pairs).all()):
        raise UserError(
            f"values: up to {float(values.abs().max()):g}, too large for scales of {scale_dtype}; "
            "give scale_dtype=torch.float32"
        )
    first_of_group = torch.arange(0, rows, 1 << min(scale_shift, 62), device=values.device)
    return TableRows(
        data=codes,
        weight_type=weight_type,
        dim=dim,
        scale=pairs[first_of_group].contiguous(),
        scale_shift=scale_shift,
    )


def _by_group(per_row: Tensor, group_of_row: Tensor, reduce: str) -> Tensor:
    """The least or largest of each row's group of rows: ``[R]``."""
    groups = int(group_of_row[-1]) + 1
    by_group = per_row.new_zeros(groups).scatter_reduce(
        0, group_of_row, per_row, reduce=reduce, include_self=False
    )
    return by_group[group_of_row]
