"""How one embedding row is stored: FBGEMM's row layouts, and the arithmetic to and from them.

============  =====================================================================
type          one row of ``D`` elements, little-endian, no padding
============  =====================================================================
``fp32``      ``D`` float32
``fp16``      ``D`` float16
``int8``      float16 scale, float16 bias, ``D`` bytes
``int4``      float16 scale, float16 bias, ``D / 2`` bytes, the even element in the low half
============  =====================================================================

An element of the integer types is ``bias + scale * code``.  The bias is the row's minimum
and the scale its range over the number of codes less one, both rounded to float16; a row whose
range is so small that the scale rounds to zero keeps its bias alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.errors import UserError

LARGEST_FLOAT16 = 65504.0
SCALE_BIAS_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class WeightType:
    """One storage type.

    Attributes:
        name: as on the command line and in the manifest.
        fbgemm_code: FBGEMM's number for it.
        bits: bits per element.
        quantized: whether a row carries a scale and a bias.
    """

    name: str
    fbgemm_code: int
    bits: int
    quantized: bool

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of ``dim`` elements."""
        return dim * self.bits // 8 + (SCALE_BIAS_BYTES if self.quantized else 0)

    def encode(self, weights: Tensor) -> Tensor:
        """Store rows.  Needs ``fbgemm_gpu_py`` loaded where the type is quantized.

        Args:
            weights: ``[R, D]`` float32, finite and within float16's range unless this is
                ``fp32``.

        Returns:
            ``[R, row_bytes(D)]`` uint8.
        """
        rows, dim = weights.shape
        if not self.quantized:
            stored = weights.to(torch.float16 if self.bits == 16 else torch.float32)
            return stored.contiguous().view(torch.uint8).reshape(rows, -1)
        # The operator wants codes that fill whole 16-bit words.  Repeating a row's last element
        # changes neither its minimum nor its maximum.
        multiple = 16 // self.bits
        padded = pad(weights.unsqueeze(1), (0, -dim % multiple), mode="replicate").squeeze(1)
        fused = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(
            padded.contiguous(), self.bits
        )
        codes = fused[:, : dim * self.bits // 8]
        return torch.cat([fused[:, -SCALE_BIAS_BYTES:], codes], dim=1)

    def decode(self, stored: Tensor, dim: int) -> Tensor:
        """The float32 values of stored rows.

        Args:
            stored: ``[R, row_bytes(dim)]`` uint8.
            dim: ``D``.

        Returns:
            ``[R, D]`` float32.
        """
        stored = stored.contiguous()
        if not self.quantized:
            return stored.view(torch.float16 if self.bits == 16 else torch.float32).float()
        # A copy: of one row, contiguous() would keep a stride that view() refuses.
        header = stored[:, :SCALE_BIAS_BYTES].clone(memory_format=torch.contiguous_format)
        scale_bias = header.view(torch.float16).float()
        codes = stored[:, SCALE_BIAS_BYTES:]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).reshape(len(stored), dim)
        return scale_bias[:, 1:] + scale_bias[:, :1] * codes.float()


WEIGHT_TYPES: dict[str, WeightType] = {
    kind.name: kind
    for kind in (
        WeightType(name="int8", fbgemm_code=2, bits=8, quantized=True),
        WeightType(name="int4", fbgemm_code=3, bits=4, quantized=True),
        WeightType(name="fp16", fbgemm_code=1, bits=16, quantized=False),
        WeightType(name="fp32", fbgemm_code=0, bits=32, quantized=False),
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
