"""How one embedding row is stored: its bytes, and the arithmetic to and from them.

============  =====================================================================
type          one row of ``D`` elements, little-endian, no padding
============  =====================================================================
``fp32``      ``D`` float32
``fp16``      ``D`` float16
``bf16``      ``D`` bfloat16
``fp8``       float16 scale, float16 zero, ``D`` float8 (e4m3fn)
``int8``      float16 scale, float16 bias, ``D`` bytes
``int4``      float16 scale, float16 bias, ``D / 2`` bytes, the even element in the low half
``int2``      float16 scale, float16 bias, ``D / 4`` bytes, the first element in the lowest bits
``int8b``     ``D`` bytes, a multiple of 16: blocks of 16 columns with their scale inside
============  =====================================================================

An element of the types with a scale is ``bias + scale * code``.  For the integer types these are
FBGEMM's rows, to the bit: the bias is the row's minimum and the scale its range over the number
of codes less one, both rounded to float16; a row whose range is so small that the scale rounds to
zero keeps its bias alone.  For ``fp8`` the scale maps the row's largest magnitude to 448, the
largest number of e4m3fn.  ``int8b`` is BLOCK_INT8 of ``kernels/csrc/plan.h``: the lowest bits of a
block's first four bytes choose one of its table's 16 scales, so that a GPU reads whole rows of
``D`` bytes and nothing beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.errors import UserError
from tessera.kernels.quantize import (
    block_scales,
    dequantize_blocks,
    quantize_blocks,
    quantize_table,
    scale_book,
)
from tessera.kernels.tables import BLOCK_COLUMNS, BOOK_SCALES
from tessera.kernels.tables import WeightType as KernelType

LARGEST_FLOAT16 = 65504.0
SCALE_BIAS_BYTES = 4
_BOOK_SAMPLE = 1 << 12  # blocks of a chunk that tell how small blocks are
_QUANTIZE = "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf"


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """One storage type.

    Attributes:
        name: as on the command line and in the manifest.
        bits: bits per element.
        codes: whether elements are unsigned integers, in FBGEMM's layout.
        element: the elements' type where they are not ``codes``.
        scaled: whether a row carries a scale and a bias.
        largest: the largest magnitude that it can hold.
        fbgemm_code: FBGEMM's number for it; None where FBGEMM's CPU lookup has no such rows.
        kernel_type: the number of `tessera.kernels.tables.WeightType`; None where there is none.
        book: the table's scales, float32 ``[16]``, where rows are blocks (`fitted` finds them).
    """

    name: str
    bits: int
    codes: bool = False
    element: torch.dtype = torch.uint8
    scaled: bool = False
    largest: float = LARGEST_FLOAT16
    fbgemm_code: int | None = None
    kernel_type: KernelType | None = None
    book: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def blocks(self) -> bool:
        """Whether rows are blocks, whose scales are in a book of the table."""
        return self.kernel_type is KernelType.BLOCK_INT8

    @property
    def book_bytes(self) -> int:
        """Bytes of a table's book."""
        return 4 * BOOK_SCALES if self.blocks else 0

    @property
    def header_bytes(self) -> int:
        """Bytes of a row's scale and bias."""
        return SCALE_BIAS_BYTES if self.scaled else 0

    @property
    def columns_per_byte(self) -> int:
        """Columns that share a byte or block; widths and cuts between columns are multiples of it."""
        return BLOCK_COLUMNS if self.blocks else max(1, 8 // self.bits)

    def data_bytes(self, dim: int) -> int:
        """Bytes of ``dim`` elements."""
        return dim * self.bits // 8

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of ``dim`` elements, scale and bias included."""
        return self.data_bytes(dim) + self.header_bytes

    def fitted(self, chunks: Iterable[Tensor]) -> WeightType:
        """The same type with what a whole table's rows share.

        Args:
            chunks: the table's rows in pieces, float32 ``[R, D]`` each; only read for blocks.
        """
        if not self.blocks:
            return self
        largest, samples = 0.0, []
        for chunk in chunks:
            needed = block_scales(chunk).flatten()
            largest = max(largest, needed.max().item())
            samples.append(needed[:: max(1, len(needed) // _BOOK_SAMPLE)])
        return replace(self, book=scale_book(largest, torch.cat(samples)))

    def encode(self, weights: Tensor) -> Tensor:
        """Store rows.  Rows of ``codes`` are made by FBGEMM's operator if ``fbgemm_gpu_py`` is loaded.

        Args:
            weights: ``[R, D]`` float32, finite and within ``largest``.

        Returns:
            ``[R, row_bytes(D)]`` uint8, scale and bias first.
        """
        rows, dim = weights.shape
        if self.element is torch.float8_e4m3fn:
            stored = quantize_table(weights.contiguous(), KernelType.FLOAT8)
            assert stored.scale is not None
            return torch.cat([stored.scale.contiguous().view(torch.uint8), stored.data], dim=1)
        if self.blocks:
            assert self.book is not None, "fitted() comes first"
            return quantize_blocks(weights, self.book)
        if not self.codes:
            return weights.to(self.element).contiguous().view(torch.uint8).reshape(rows, -1)
        # Of 0.0 and -0.0 either may come out as the minimum, by the order of comparisons.
        weights = weights + 0.0
        if not hasattr(torch.ops.fbgemm, _QUANTIZE):
            return _affine_rows(weights, self.bits)
        # The operator wants codes that fill whole 16-bit words.  Repeating a row's last element
        # changes neither its minimum nor its maximum.
        multiple = 16 // self.bits
        padded = pad(weights.unsqueeze(1), (0, -dim % multiple), mode="replicate").squeeze(1)
        fused = getattr(torch.ops.fbgemm, _QUANTIZE)(padded.contiguous(), self.bits)
        codes = fused[:, : self.data_bytes(dim)]
        return torch.cat([fused[:, -SCALE_BIAS_BYTES:], codes], dim=1)

    def decode(self, stored: Tensor, dim: int) -> Tensor:
        """The float32 values of stored rows.

        Args:
            stored: ``[R, row_bytes(dim)]`` uint8.
            dim: ``D``.

        Returns:
            ``[R, D]`` float32.
        """
        if self.blocks:
            assert self.book is not None, "fitted() comes first"
            return dequantize_blocks(stored, self.book, dim)
        if not self.scaled:
            return _plain(stored).view(self.element).float()
        scale_bias = _plain(stored[:, :SCALE_BIAS_BYTES]).view(torch.float16).float()
        codes = _plain(stored[:, SCALE_BIAS_BYTES:])
        if not self.codes:
            values = codes.view(self.element).float()
        elif self.bits < 8:
            shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8)
            parts = (codes.unsqueeze(2) >> shifts) & ((1 << self.bits) - 1)
            values = parts.reshape(len(stored), dim).float()
        else:
            values = codes.float()
        return scale_bias[:, 1:] + scale_bias[:, :1] * values

    def take_columns(self, stored: Tensor, begin: int, end: int) -> Tensor:
        """Columns ``[begin, end)`` of stored rows, with the whole rows' scales and biases.

        Args:
            stored: ``[R, row_bytes(D)]`` uint8.
            begin: a multiple of `columns_per_byte`.
            end: likewise, or ``D``.

        Returns:
            ``[R, row_bytes(end - begin)]`` uint8.
        """
        header = self.header_bytes
        data = stored[:, header + self.data_bytes(begin) : header + self.data_bytes(end)]
        return torch.cat([stored[:, :header], data], dim=1)


def _affine_rows(weights: Tensor, bits: int) -> Tensor:
    """What FBGEMM's operator gives, scale and bias first, for machines without it."""
    levels = (1 << bits) - 1
    bias = weights.amin(dim=1).half()
    # The range is measured from the stored bias.
    span = weights.amax(dim=1) - bias.float()
    scale = (span / levels).half()
    inverse = 1.0 / scale.float()
    lost = (scale == 0) | torch.isinf(inverse)
    scale = torch.where(lost, torch.ones_like(scale), scale)
    inverse = torch.where(lost, torch.ones_like(inverse), inverse)
    steps = (weights - bias.float().unsqueeze(1)) * inverse.unsqueeze(1)
    codes = steps.round().clamp(0, levels).to(torch.uint8)
    per_byte = 8 // bits
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    packed = (codes.view(len(weights), -1, per_byte) << shifts).sum(dim=2, dtype=torch.uint8)
    header = torch.stack([scale, bias], dim=1).view(torch.uint8)
    return torch.cat([header, packed], dim=1)


def _plain(stored: Tensor) -> Tensor:
    # A copy: of one row, contiguous() would keep a stride that view() refuses.
    return stored.clone(memory_format=torch.contiguous_format)


WEIGHT_TYPES: dict[str, WeightType] = {
    kind.name: kind
    for kind in (
        WeightType(
            name="int8",
            bits=8,
            codes=True,
            scaled=True,
            fbgemm_code=2,
            kernel_type=KernelType.INT8,
        ),
        WeightType(
            name="int4",
            bits=4,
            codes=True,
            scaled=True,
            fbgemm_code=3,
            kernel_type=KernelType.INT4,
        ),
        WeightType(
            name="int8b",
            bits=8,
            largest=math.inf,
            kernel_type=KernelType.BLOCK_INT8,
        ),
        WeightType(name="int2", bits=2, codes=True, scaled=True, fbgemm_code=4),
        WeightType(
            name="fp8",
            bits=8,
            element=torch.float8_e4m3fn,
            scaled=True,
            kernel_type=KernelType.FLOAT8,
        ),
        WeightType(
            name="fp16",
            bits=16,
            element=torch.float16,
            fbgemm_code=1,
            kernel_type=KernelType.FLOAT16,
        ),
        WeightType(
            name="bf16",
            bits=16,
            element=torch.bfloat16,
            largest=math.inf,
            kernel_type=KernelType.BFLOAT16,
        ),
        WeightType(
            name="fp32",
            bits=32,
            element=torch.float32,
            largest=math.inf,
            fbgemm_code=0,
            kernel_type=KernelType.FLOAT32,
        ),
    )
}
"""The types that ``package-model --dtype`` offers."""


def weight_type(name: str) -> WeightType:
    """The type called ``name``.

    Raises:
        UserError: there is none.
    """
    found = WEIGHT_TYPES.get(name)
    if found is None:
        raise UserError(f"dtype {name!r} is unknown; give one of {', '.join(WEIGHT_TYPES)}")
    return found
