"""Codecs of communication: vectors and gradients in fewer bytes on their way.

| precision | bytes per number | error of a number x, in a row of numbers between lo and hi |
| --- | --- | --- |
| fp16 | 2 | ``2**-11 * |x|`` or ``2**-25`` (beyond +-65504: infinite) |
| bf16 | 2 | ``2**-8 * |x|`` |
| fp8, forward (4 bits of exponent) | 1 + 4 per row | ``2**-4 * |x|`` or ``2**-10 * max|row| / 448`` |
| fp8, backward (5 bits of exponent) | 1 + 4 per row | ``2**-3 * |x|`` or ``2**-17 * max|row| / 57344`` |
| int8 | 1 + 8 per row | ``(hi - lo) / 510``, and rounding of float32 |

A row is what is scaled together: ``quantize_dim`` successive numbers; a piece that is not a multiple
of it is filled up.  Sums over ranks add decoded numbers in float32, so every precision serves
every collective, on CPU and GPU alike, and errors do not grow in the sum's own format.

The module has TorchRec's name; the codecs are written in torch and need no FBGEMM.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

import torch
from torch import Tensor

from tessera.training.distributed.comm.codec_types import (
    CommOp,
    QuantizedCommCodec,
    QuantizedCommCodecs,
)

DEFAULT_ROW_DIM = 32


@unique
class CommType(Enum):
    """Names the type that numbers have on their way."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    def __str__(self) -> str:
        return self.value


@dataclass
class QCommsConfig:
    """Says how vectors and their gradients are encoded on their way.

    Attributes:
        forward_precision: of vectors.
        backward_precision: of gradients.
        forward_loss_scale: vectors are multiplied by it before and divided by it behind; fp16
            only, whose smallest normal number is 6e-5.
        backward_loss_scale: the same for gradients.
        fp8_quantize_dim: numbers per row of fp8; None: 32.
        fp8_quantize_dim_bwd: the same for gradients; None: as forwards.
        int8_quantize_dim: numbers per row of int8; None: 32.
        int8_quantize_dim_bwd: the same for gradients; None: as forwards.

    Raises:
        ValueError: an option of another precision than the chosen one, or that is not positive.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    int8_quantize_dim: int | None = None
    int8_quantize_dim_bwd: int | None = None

    def __post_init__(self) -> None:
        both = {self.forward_precision, self.backward_precision}
        forward, backward = {self.forward_precision}, {self.backward_precision}
        for name, needed, directions in (
            ("forward_loss_scale", CommType.FP16, forward),
            ("backward_loss_scale", CommType.FP16, backward),
            ("fp8_quantize_dim", CommType.FP8, both),
            ("fp8_quantize_dim_bwd", CommType.FP8, backward),
            ("int8_quantize_dim", CommType.INT8, both),
            ("int8_quantize_dim_bwd", CommType.INT8, backward),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if needed not in directions:
                chosen = " and ".join(sorted(str(kind) for kind in directions))
                raise ValueError(
                    f"{name} is {value}, but the precision is {chosen}; it serves {needed} only"
                )
            if value <= 0:
                raise ValueError(f"{name} is {value}; give a positive number")


class HalfCodec(QuantizedCommCodec[None]):
    """Encodes numbers as numbers of 16 bits.

    Args:
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        loss_scale: see `QCommsConfig`.
    """

    def __init__(self, dtype: torch.dtype, loss_scale: float | None = None) -> None:
        self._dtype = dtype
        self._loss_scale = loss_scale

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        """Scale the numbers and round them to 16 bits."""
        del ctx
        flat = input_tensor.reshape(-1)
        return (flat if self._loss_scale is None else flat * self._loss_scale).to(self._dtype)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        """Convert the numbers back and undo the scaling."""
        del ctx
        wide = input_grad.to(torch.float32)
        return wide if self._loss_scale is None else wide.div_(self._loss_scale)

    def quantized_dtype(self) -> torch.dtype:
        """Return the 16-bit type."""
        return self._dtype


class _RowCodec(QuantizedCommCodec[None], ABC):
    """Rows of ``row_dim`` bytes with ``header_bytes`` before each."""

    header_bytes: int

    def __init__(self, row_dim: int) -> None:
        self.row_dim = row_dim

    def encode(self, input_tensor: Tensor, ctx: None = None) -> Tensor:
        """Fill the numbers up to whole rows and encode each row."""
        del ctx
        flat = input_tensor.reshape(-1).to(torch.float32)
        if missing := -flat.numel() % self.row_dim:
            # With a number of the last row: its range stays what it is.
            flat = torch.cat([flat, flat[-1:].expand(missing)])
        rows = flat.view(-1, self.row_dim)
        if rows.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        header, codes = self._encode_rows(rows)
        return torch.cat([header.view(torch.uint8), codes], dim=1).view(-1)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        """Decode whole rows to float32 numbers, in one dimension."""
        del ctx
        rows = input_grad.view(-1, self.header_bytes + self.row_dim)
        # A copy, for a float32 view must begin at a multiple of four bytes.
        header = rows[:, : self.header_bytes].clone(memory_format=torch.contiguous_format)
        return self._decode_rows(header.view(torch.float32), rows[:, self.header_bytes :]).view(-1)

    def quantized_dtype(self) -> torch.dtype:
        """Return the type of bytes."""
        return torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Return the number of bytes of whole rows with their headers."""
        del ctx
        return -(-input_len // self.row_dim) * (self.header_bytes + self.row_dim)

    @abstractmethod
    def _encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, row_dim]`` to float32 headers and uint8 codes."""

    @abstractmethod
    def _decode_rows(self, header: Tensor, codes: Tensor) -> Tensor:
        """Decode headers and codes to float32 ``[n, row_dim]``."""


class Fp8Codec(_RowCodec):
    """Numbers of 8 bits with an exponent, each row scaled so that its largest fits.

    Args:
        row_dim: numbers per row.
        forward: 4 bits of exponent and 3 of mantissa (vectors), else 5 and 2 (gradients, whose
            sizes differ more).
    """

    header_bytes = 4

    def __init__(self, row_dim: int, *, forward: bool) -> None:
        super().__init__(row_dim)
        self._dtype = torch.float8_e4m3fn if forward else torch.float8_e5m2
        self._largest = torch.finfo(self._dtype).max

    def _encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        scale = rows.abs().amax(dim=1, keepdim=True).div_(self._largest)
        # A row of zeros, or of numbers too small to be scaled up, is sent as it is.
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
        # Rounding of the division must not carry the largest number over the edge.
        scaled = (rows / scale).clamp_(-self._largest, self._largest)
        return scale, scaled.to(self._dtype).view(torch.uint8)

    def _decode_rows(self, header: Tensor, codes: Tensor) -> Tensor:
        return codes.contiguous().view(self._dtype).to(torch.float32).mul_(header)


class Int8Codec(_RowCodec):
    """256 steps between the smallest and the largest number of each row.

    Args:
        row_dim: numbers per row.
    """

    header_bytes = 8

    def _encode_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        step = (high - low).div_(255)
        codes = (rows - low).div_(torch.where(step == 0, 1.0, step)).round_().clamp_(0, 255)
        return torch.cat([step, low], dim=1), codes.to(torch.uint8)

    def _decode_rows(self, header: Tensor, codes: Tensor) -> Tensor:
        return codes.to(torch.float32).mul_(header[:, :1]).add_(header[:, 1:])


def _codec(config: QCommsConfig, *, forward: bool) -> QuantizedCommCodec[None]:
    precision = config.forward_precision if forward else config.backward_precision
    scale = config.forward_loss_scale if forward else config.backward_loss_scale
    dims = {
        CommType.FP8: (config.fp8_quantize_dim_bwd, config.fp8_quantize_dim),
        CommType.INT8: (config.int8_quantize_dim_bwd, config.int8_quantize_dim),
    }
    given = dims.get(precision, (None, None))[1 if forward else 0 :]
    row_dim = next((dim for dim in given if dim), DEFAULT_ROW_DIM)
    made: dict[CommType, Callable[[], QuantizedCommCodec[None]]] = {
        CommType.FP32: QuantizedCommCodec,
        CommType.FP16: lambda: HalfCodec(torch.float16, scale),
        CommType.BF16: lambda: HalfCodec(torch.bfloat16),
        CommType.FP8: lambda: Fp8Codec(row_dim, forward=forward),
        CommType.INT8: lambda: Int8Codec(row_dim),
    }
    return made[precision]()


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """The codecs of both directions; None: numbers travel as they are."""
    config = qcomms_config or QCommsConfig()
    return QuantizedCommCodecs(_codec(config, forward=True), _codec(config, forward=False))


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: list[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs] | None:
    """Codecs for the sharders' ``qcomm_codecs_registry``.

    Args:
        qcomms_config: how numbers travel.
        comm_ops: the collectives that it is for; None: all.
        device: where they run; every precision serves every device, so it may be left out.

    Returns:
        The codecs by `CommOp` name; None if nothing is encoded.
    """
    del device
    if {qcomms_config.forward_precision, qcomms_config.backward_precision} == {CommType.FP32}:
        return None
    return {comm_op.name: get_qcomm_codecs(qcomms_config) for comm_op in comm_ops or list(CommOp)}
