"""How a quantized table's rows are stored: the row types that FBGEMM's lookup reads, aligned.

A row is as `tessera.kernels.row_types` makes it, scale and bias first, with zeros up to a multiple of
the row alignment.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.errors import UserError, refuse_unknown
from tessera.kernels.row_types import RowType, fbgemm_types
from tessera.training.fbgemm import load_sparse_operators
from tessera.training.modules.embedding_configs import DataType

DEFAULT_ROW_ALIGNMENT = 16
"""Bytes; what a GPU thread reads at a time.  Rows are the same on every device."""

_ROWS_AT_A_TIME = 1 << 18  # bounds the float32 copy that quantization makes

STORED_TYPES: dict[DataType, RowType] = {
    DataType(kind.name.upper()): kind for _, kind in sorted(fbgemm_types().items())
}
"""The types that tables of a quantized collection have."""

_DATA_TYPES = {
    torch.float32: DataType.FP32,
    torch.float16: DataType.FP16,
    torch.int8: DataType.INT8,
    torch.uint8: DataType.INT8,
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
}


def stored_data_type(dtype: torch.dtype) -> DataType:
    """The stored type that a config's weight ``dtype`` asks for; a UserError if there is none."""
    refuse_unknown("quantized tables: weight dtype", dtype, _DATA_TYPES)
    return _DATA_TYPES[dtype]


def check_stored(name: str, dim: int, data_type: DataType) -> RowType:
    """The row type of a table; a UserError where its width or type cannot be stored."""
    kinds = [kind.value for kind in STORED_TYPES]
    refuse_unknown(f"table {name!r} is quantized: data_type", data_type.value, kinds)
    kind = STORED_TYPES[data_type]
    if kind.bits < 8 and dim * kind.bits % 16:
        raise UserError(
            f"table {name!r} has {dim} columns; {data_type.value} needs a multiple of "
            f"{16 // kind.bits} (or give the table INT8)"
        )
    return kind


def aligned_row_bytes(kind: RowType, dim: int, row_alignment: int) -> int:
    """Bytes of a row of ``dim`` numbers, padding included."""
    return -(-kind.row_bytes(dim) // row_alignment) * row_alignment


def quantize_rows(weights: Tensor, data_type: DataType) -> tuple[Tensor, Tensor | None]:
    """Rows as packages store them, which is FBGEMM's layout with float16 scales and biases.

    Args:
        weights: ``[rows, dim]`` float32, float16 or bfloat16.
        data_type: one of `STORED_TYPES`.

    Returns:
        The numbers ``[rows, dim * bits / 8]`` uint8, and scale and bias ``[rows, 4]`` uint8 of
        an integer type.
    """
    kind = STORED_TYPES[data_type]
    load_sparse_operators()
    stored = kind.encode(weights.detach().float())
    scales = stored[:, : kind.header_bytes] if kind.scaled else None
    return stored[:, kind.header_bytes :], scales


def store_rows(weights: Tensor, data_type: DataType, out: Tensor) -> None:
    """Quantize ``weights`` ``[rows, dim]`` into ``out`` ``[rows, row bytes]`` uint8, in place."""
    for first in range(0, weights.size(0), _ROWS_AT_A_TIME):
        own = slice(first, first + _ROWS_AT_A_TIME)
        store_quantized(*quantize_rows(weights[own].to(out.device), data_type), out[own])


def store_quantized(numbers: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Put what `quantize_rows` gave into ``out`` ``[rows, row bytes]`` uint8, in place."""
    stored = numbers if scales is None else torch.cat([scales, numbers], dim=1)
    out[:, : stored.size(1)] = stored
    out[:, stored.size(1) :] = 0
