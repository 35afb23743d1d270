"""How a quantized table's rows are stored: FBGEMM's row-wise layout, bit for bit.

A row of an integer type begins with its scale and bias (float16 each), then come the numbers,
then zeros up to a multiple of the row alignment; a row of a float type has no scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.errors import UserError
from tessera.training.fbgemm import import_sparse_operators
from tessera.training.modules.embedding_configs import DataType

DEFAULT_ROW_ALIGNMENT = 16
"""Bytes; what a GPU thread reads at a time.  Rows are the same on every device."""

_ROWS_AT_A_TIME = 1 << 18  # bounds the float32 copy that quantization makes


@dataclass(frozen=True, kw_only=True)
class StoredType:
    """How one number is stored.

    Attributes:
        code: FBGEMM's number of the type (``SparseType``).
        bits: of one number.
        header_bytes: scale and bias.
    """

    code: int
    bits: int
    header_bytes: int

    def row_bytes(self, dim: int, row_alignment: int) -> int:
        """Bytes of a row of ``dim`` numbers, padding included."""
        used = self.header_bytes + dim * self.bits // 8
        return -(-used // row_alignment) * row_alignment


STORED_TYPES: dict[DataType, StoredType] = {
    DataType.FP32: StoredType(code=0, bits=32, header_bytes=0),
    DataType.FP16: StoredType(code=1, bits=16, header_bytes=0),
    DataType.INT8: StoredType(code=2, bits=8, header_bytes=4),
    DataType.INT4: StoredType(code=3, bits=4, header_bytes=4),
    DataType.INT2: StoredType(code=4, bits=2, header_bytes=4),
}

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
    """The stored type that a quantization config's weight ``dtype`` asks for.

    Raises:
        UserError: rows are not stored so.
    """
    if dtype not in _DATA_TYPES:
        raise UserError(
            f"weight dtype is {dtype}; quantized tables take "
            f"{', '.join(str(known) for known in _DATA_TYPES)}"
        )
    return _DATA_TYPES[dtype]


def check_stored(name: str, dim: int, data_type: DataType) -> StoredType:
    """The stored type of a table.

    Raises:
        UserError: a type that is not stored, or a width that does not fill pairs of bytes.
    """
    if data_type not in STORED_TYPES:
        raise UserError(
            f"table {name!r}: data_type is {data_type.value}; quantized tables take "
            f"{', '.join(kind.value for kind in STORED_TYPES)}"
        )
    kind = STORED_TYPES[data_type]
    if kind.bits < 8 and dim * kind.bits % 16:
        raise UserError(
            f"table {name!r} has {dim} columns; {data_type.value} needs a multiple of "
            f"{16 // kind.bits} (or give the table INT8)"
        )
    return kind


def quantize_rows(weights: Tensor, data_type: DataType) -> tuple[Tensor, Tensor | None]:
    """Rows as FBGEMM quantizes them.

    Args:
        weights: ``[rows, dim]`` float32, float16 or bfloat16.
        data_type: one of `STORED_TYPES`.

    Returns:
        The numbers ``[rows, dim * bits / 8]`` uint8, and scale and bias ``[rows, 4]`` uint8 of
        an integer type.
    """
    rows = weights.detach().float()
    width = rows.size(1) * STORED_TYPES[data_type].bits // 8
    if data_type is DataType.FP32:
        return rows.contiguous().view(torch.uint8), None
    if data_type is DataType.FP16:
        return rows.half().contiguous().view(torch.uint8), None
    import_sparse_operators()
    if data_type is DataType.INT8:
        fused = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
        scales = fused[:, -8:].contiguous().view(torch.float32).half().view(torch.uint8)
        return fused[:, :width], scales
    bits = STORED_TYPES[data_type].bits
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, bit_rate=bits)
    return fused[:, :width], fused[:, -4:]


def store_rows(weights: Tensor, data_type: DataType, out: Tensor) -> None:
    """Quantize ``weights`` ``[rows, dim]`` into ``out`` ``[rows, row bytes]`` uint8, in place."""
    for first in range(0, weights.size(0), _ROWS_AT_A_TIME):
        own = slice(first, first + _ROWS_AT_A_TIME)
        store_quantized(*quantize_rows(weights[own].to(out.device), data_type), out[own])


def store_quantized(numbers: Tensor, scales: Tensor | None, out: Tensor) -> None:
    """Put what `quantize_rows` gave into ``out`` ``[rows, row bytes]`` uint8, in place."""
    header = 0
    if scales is not None:
        header = scales.size(1)
        out[:, :header] = scales
    out[:, header : header + numbers.size(1)] = numbers
    out[:, header + numbers.size(1) :] = 0


def float_rows(rows: Tensor, dim: int, data_type: DataType) -> Tensor:
    """What a lookup sees: ``rows`` ``[rows, row bytes]`` as ``[rows, dim]`` float32."""
    kind = STORED_TYPES[data_type]
    body = rows[:, kind.header_bytes : kind.header_bytes + dim * kind.bits // 8].contiguous()
    if data_type is DataType.FP32:
        return body.view(torch.float32)
    if data_type is DataType.FP16:
        return body.view(torch.float16).float()
    scale_bias = rows[:, :4].contiguous().view(torch.float16).float()
    per_byte = 8 // kind.bits
    shifts = torch.arange(per_byte, device=rows.device) * kind.bits
    codes = (body.unsqueeze(2) >> shifts) & (2**kind.bits - 1)
    numbers: Tensor = codes.flatten(1).float() * scale_bias[:, :1] + scale_bias[:, 1:]
    return numbers
