"""Codecs of communication: vectors and gradients in fewer bytes on their way.

| precision | bytes per number | error of a number x, in a row of numbers between lo and hi |
| --- | --- | --- |
| fp16 | 2 | ``2**-11 * |x|`` or ``2**-25`` (beyond +-65504: infinite) |
| bf16 | 2 | ``2**-8 * |x|`` |
| fp8, forward (4 bits of exponent) | 1 + 4 per row | ``2**-4 * |x|`` or ``2**-10 * max|row| / 448`` |
| fp8, backward (5 bits of exponent) | 1 + 4 per row | ``2**-3 * |x|`` or ``2**-17 * max|row| / 57344`` |
| int8 | 1 + 8 per row | ``(hi - lo) / 510``, and rounding of float32 |
| mx4 | .5 + 1 per row | ``|x| / 5`` or ``max|row| / 14``; `tessera.training.distributed.comm.mx4` |

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

from tessera.training.distributed.comm import mx4
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
    MX4 = "mx4"

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
        fp8_bwd_uses_143: gradients, too, have 4 bits of exponent in fp8.
        mx4_quantize_dim: numbers per row of mx4, an even number; None: 32.
        mx4_quantize_dim_bwd: the same for gradients; None: as forwards.
        mx4_rounding_mode: how the exponent of a row of mx4 is rounded, an entry of FBGEMM's `RoundingMode` or its
            number: nearest (0), floor (1), even (2), stochastic (3) or ceil (4); None: even.  The bound above is for even.

    Raises:
        ValueError: an option of another precision than the chosen one, or that is not positive; a row of mx4
            that is not even; a rounding mode that does not exist.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    int8_quantize_dim: int | None = None
    int8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool | None = False
    mx4_quantize_dim: int | None = None
    mx4_quantize_dim_bwd: int | None = None
    mx4_rounding_mode: int | None = None

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
            ("fp8_bwd_uses_143", CommType.FP8, backward),
            ("mx4_quantize_dim", CommType.MX4, both),
            ("mx4_quantize_dim_bwd", CommType.MX4, backward),
            ("mx4_rounding_mode", CommType.MX4, both),
        ):
            value = getattr(self, name)
            if value is None or value is False:
                continue
            if needed not in directions:
                chosen = " and ".join(sorted(str(kind) for kind in directions))
                raise ValueError(
                    f"{name} is {value}, but the precision is {chosen}; it serves {needed} only"
                )
            if name == "mx4_rounding_mode":
                if value not in {*mx4.THRESHOLDS, mx4.STOCHASTIC}:
                    raise ValueError(f"{name} is {value}; give one of FBGEMM's modes, 0 to 4")
            elif value <= 0:
                raise ValueError(f"{name} is {value}; give a positive number")
            elif needed is CommType.MX4 and value % 2:
                raise ValueError(
                    f"{name} is {value}; two numbers share a byte, so give an even number"
                )


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
    """Rows of ``row_dim`` numbers, each of ``row_bytes`` bytes."""

    row_bytes: int

    def __init__(self, row_dim: int, row_bytes: int) -> None:
        self.row_dim = row_dim
        self.row_bytes = row_bytes

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
        return self._encode_rows(rows).view(-1)

    def decode(self, input_grad: Tensor, ctx: None = None) -> Tensor:
        """Decode whole rows to float32 numbers, in one dimension."""
        del ctx
        return self._decode_rows(input_grad.view(-1, self.row_bytes)).view(-1)

    def quantized_dtype(self) -> torch.dtype:
        """Return the type of bytes."""
        return torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Return the number of bytes of whole rows."""
        del ctx
        return -(-input_len // self.row_dim) * self.row_bytes

    @abstractmethod
    def _encode_rows(self, rows: Tensor) -> Tensor:
        """``[n, row_dim]`` to uint8 ``[n, row_bytes]``."""

    @abstractmethod
    def _decode_rows(self, rows: Tensor) -> Tensor:
        """The float32 numbers ``[n, row_dim]`` of ``[n, row_bytes]``."""


def _headed(header: Tensor, codes: Tensor) -> Tensor:
    """Rows of bytes, each with its float32 numbers ``header`` before its ``codes``."""
    return torch.cat([header.view(torch.uint8), codes], dim=1)


def _parts(rows: Tensor, headers: int) -> tuple[Tensor, Tensor]:
    """The ``headers`` float32 numbers of each row of `_headed`, and its codes."""
    nbytes = 4 * headers
    # A copy, for a float32 view must begin at a multiple of four bytes.
    header = rows[:, :nbytes].clone(memory_format=torch.contiguous_format)
    return header.view(torch.float32), rows[:, nbytes:]


class Fp8Codec(_RowCodec):
    """Numbers of 8 bits with an exponent, each row scaled so that its largest fits.

    Args:
        row_dim: numbers per row.
        forward: 4 bits of exponent and 3 of mantissa (vectors), else 5 and 2 (gradients, whose
            sizes differ more).
    """

    def __init__(self, row_dim: int, *, forward: bool) -> None:
        super().__init__(row_dim, row_bytes=4 + row_dim)
        self._dtype = torch.float8_e4m3fn if forward else torch.float8_e5m2
        self._largest = torch.finfo(self._dtype).max

    def _encode_rows(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax(dim=1, keepdim=True).div_(self._largest)
        # A row of zeros, or of numbers too small to be scaled up, is sent as it is.
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
        # Rounding of the division must not carry the largest number over the edge.
        scaled = (rows / scale).clamp_(-self._largest, self._largest)
        return _headed(scale, scaled.to(self._dtype).view(torch.uint8))

    def _decode_rows(self, rows: Tensor) -> Tensor:
        header, codes = _parts(rows, 1)
        return codes.contiguous().view(self._dtype).to(torch.float32).mul_(header)


class Int8Codec(_RowCodec):
    """256 steps between the smallest and the largest number of each row.

    Args:
        row_dim: numbers per row.
    """

    def __init__(self, row_dim: int) -> None:
        super().__init__(row_dim, row_bytes=8 + row_dim)

    def _encode_rows(self, rows: Tensor) -> Tensor:
        low, high = torch.aminmax(rows, dim=1, keepdim=True)
        step = (high - low).div_(255)
        codes = (rows - low).div_(torch.where(step == 0, 1.0, step)).round_().clamp_(0, 255)
        return _headed(torch.cat([step, low], dim=1), codes.to(torch.uint8))

    def _decode_rows(self, rows: Tensor) -> Tensor:
        header, codes = _parts(rows, 2)
        return codes.to(torch.float32).mul_(header[:, :1]).add_(header[:, 1:])


class Mx4Codec(_RowCodec):
    """Numbers of 4 bits, each row with one exponent.

    Args:
        row_dim: numbers per row, even.
        rounding_mode: the number of FBGEMM's mode, see `QCommsConfig`.
    """

    def __init__(self, row_dim: int, rounding_mode: int = mx4.EVEN) -> None:
        super().__init__(row_dim, row_bytes=row_dim // 2 + 1)
        self._mode = rounding_mode

    def _encode_rows(self, rows: Tensor) -> Tensor:
        return mx4.encode(rows, self._mode)

    def _decode_rows(self, rows: Tensor) -> Tensor:
        return mx4.decode(rows)


def _codec(config: QCommsConfig, *, forward: bool) -> QuantizedCommCodec[None]:
    precision = config.forward_precision if forward else config.backward_precision
    scale = config.forward_loss_scale if forward else config.backward_loss_scale
    dims = {
        CommType.FP8: (config.fp8_quantize_dim_bwd, config.fp8_quantize_dim),
        CommType.INT8: (config.int8_quantize_dim_bwd, config.int8_quantize_dim),
        CommType.MX4: (config.mx4_quantize_dim_bwd, config.mx4_quantize_dim),
    }
    given = dims.get(precision, (None, None))[1 if forward else 0 :]
    row_dim = next((dim for dim in given if dim), DEFAULT_ROW_DIM)
    mode = mx4.EVEN if config.mx4_rounding_mode is None else int(config.mx4_rounding_mode)
    made: dict[CommType, Callable[[], QuantizedCommCodec[None]]] = {
        CommType.FP32: QuantizedCommCodec,
        CommType.FP16: lambda: HalfCodec(torch.float16, scale),
        CommType.BF16: lambda: HalfCodec(torch.bfloat16),
        CommType.FP8: lambda: Fp8Codec(row_dim, forward=forward or bool(config.fp8_bwd_uses_143)),
        CommType.INT8: lambda: Int8Codec(row_dim),
        CommType.MX4: lambda: Mx4Codec(row_dim, mode),
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
