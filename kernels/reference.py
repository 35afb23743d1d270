"""The lookup operators, plain and slow: what every kernel must equal.

Ids are Python integers, rows are decoded by numpy one at a time, sums run in the order of the
ids.  The multiply-add of a kernel is one rounding: here the product is exact in float64 (two
24-bit factors), so adding there and rounding once to float32 gives the same value.

Shapes as in `tessera.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera.kernels.plan import (
    IdRule,
    OutOfRange,
    PlanRow,
    Pooling,
    ScaleType,
    plan_rows,
    scale_bytes,
)
from tessera.kernels.row_codecs import BLOCK_COLUMNS
from tessera.kernels.row_types import kernel_types

_MASK = 2**64 - 1
_Floats = NDArray[np.float32]


def murmur3(value: int) -> int:
    """MurmurHash3's 64-bit finaliser of an int64, as an unsigned integer."""
    h = value & _MASK
    h ^= h >> 33
    h = (h * 0xFF51AFD7ED558CCD) & _MASK
    h ^= h >> 33
    h = (h * 0xC4CEB9FE1A85EC53) & _MASK
    return h ^ (h >> 33)


def resolve_id(raw: int, rows: int, id_rule: IdRule, out_of_range: OutOfRange) -> tuple[int, bool]:
    """The row of a raw id (-1: contributes nothing), and whether it was outside the table."""
    if id_rule is IdRule.MODULO:
        return raw % rows, False
    if id_rule is IdRule.MURMUR3:
        return murmur3(raw) % rows, False
    if 0 <= raw < rows:
        return raw, False
    if out_of_range is OutOfRange.CLAMP:
        return (0 if raw < 0 else rows - 1), True
    if out_of_range is OutOfRange.ZERO:
        return -1, True
    return murmur3(raw) % rows, True


class _Feature:
    """One row of the plan over its weights."""

    def __init__(self, weights: Tensor, plan: PlanRow) -> None:
        self.weights = weights.numpy()
        self.plan = plan
        self.rows, self.dim, self.out_column = plan.rows, plan.dim, plan.out_column
        (self.row_type,) = (t for t in kernel_types() if t.kernel_number == plan.weight_type)
        self.scale_type = ScaleType(plan.scale_type)
        self.pooling = Pooling(plan.pooling)
        self.id_rule = IdRule(plan.id_rule)
        self.out_of_range = OutOfRange(plan.out_of_range)

    def data(self, row: int) -> _Floats:
        """The stored values of a row before scale and bias, float32 [D]."""
        start = self.plan.data_offset + row * self.plan.row_stride
        stored = self.weights[start : start + self.row_type.data_bytes(self.dim)].copy()
        values: _Floats = self.row_type.numbers(torch.from_numpy(stored)[None], self.dim)[0].numpy()
        return values

    def block_scales(self, row: int) -> _Floats:
        """The scale of each column of a row in blocks, float32 [D]."""
        start = self.plan.data_offset + row * self.plan.row_stride
        at = self.plan.scale_offset
        book = self.weights[at : at + scale_bytes(ScaleType.BOOK)]
        scales = []
        for column in range(0, self.dim, BLOCK_COLUMNS):
            bits = self.weights[start + column : start + column + 4] & 1
            code = sum(int(bit) << k for k, bit in enumerate(bits))
            scales += [book.copy().view(np.float32)[code]] * BLOCK_COLUMNS
        return np.array(scales[: self.dim], dtype=np.float32)

    def scale_and_bias(self, row: int) -> tuple[np.float32, np.float32]:
        """The row's scale and bias."""
        start = self.plan.scale_offset + (row >> self.plan.scale_shift) * self.plan.scale_stride
        dtype = np.float16 if self.scale_type is ScaleType.FLOAT16 else np.float32
        size = scale_bytes(self.scale_type)
        pair = self.weights[start : start + size].copy().view(dtype).astype(np.float32)
        return pair[0], pair[1]

    def pool(self, raw_ids: list[int], id_weights: list[float] | None) -> tuple[_Floats, int]:
        """A bag's vector, float32 [D], and how many ids were outside the table."""
        total: Any = np.zeros(self.dim, dtype=np.float32)
        bias_total = np.float32(0)
        outside = 0
        for position, raw in enumerate(raw_ids):
            row, was_outside = resolve_id(raw, self.rows, self.id_rule, self.out_of_range)
            outside += was_outside
            if row < 0:
                continue
            factor: Any = np.float32(1.0 if id_weights is None else id_weights[position])
            if self.scale_type is ScaleType.BOOK:
                factor = factor * self.block_scales(row)
            elif self.scale_type is not ScaleType.NONE:
                scale, bias = self.scale_and_bias(row)
                bias_total = np.float32(bias_total + np.float32(factor * bias))
                factor = np.float32(factor * scale)
            product = factor.astype(np.float64) * self.data(row).astype(np.float64)
            total = np.add(product, total, dtype=np.float64).astype(np.float32)
        if self.scale_type in (ScaleType.FLOAT16, ScaleType.FLOAT32):
            total = total + bias_total
        if self.pooling is Pooling.MEAN and len(raw_ids) > 1:
            total = total / np.float32(len(raw_ids))
        return total, outside


def _features(weights: Tensor, plan: Tensor) -> list[_Feature]:
    return [_Feature(weights, row) for row in plan_rows(plan)]


def lookup(
    weights: Tensor,
    plan: Tensor,
    indices: Tensor,
    lengths: Tensor,
    width: int,
    *,
    id_weights: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Pooled lookup: ``[B, width]`` (NaN in columns that no feature writes) and the counts [F]."""
    features = _features(weights, plan)
    batch = lengths.numel() // len(features)
    out = torch.full((batch, width), float("nan"))
    outside = torch.zeros(len(features), dtype=torch.int64)
    ids, sizes = indices.tolist(), lengths.tolist()
    factors = None if id_weights is None else id_weights.tolist()
    begin = 0
    for f, feature in enumerate(features):
        for sample in range(batch):
            end = begin + sizes[f * batch + sample]
            vector, count = feature.pool(
                ids[begin:end], None if factors is None else factors[begin:end]
            )
            last = feature.out_column + feature.dim
            out[sample, feature.out_column : last] = torch.from_numpy(vector)
            outside[f] += count
            begin = end
    return out.to(dtype), outside


def lookup_rows(
    weights: Tensor,
    plan: Tensor,
    indices: Tensor,
    lengths: Tensor,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Unpooled lookup: ``[N, width]``."""
    features = _features(weights, plan)
    batch = lengths.numel() // len(features)
    sizes = lengths.tolist()
    vectors = []
    begin = 0
    for f, feature in enumerate(features):
        end = begin + sum(sizes[f * batch : (f + 1) * batch])
        vectors += [
            torch.from_numpy(feature.pool([raw], None)[0]) for raw in indices[begin:end].tolist()
        ]
        begin = end
    return torch.stack(vectors).to(dtype) if vectors else torch.empty(0, width, dtype=dtype)


def dot_interaction(dense: Tensor, sparse: Tensor, *, upper: bool = False) -> Tensor:
    """DLRM's interaction in float64, rounded once: ``[B, D + n (n - 1) / 2]``."""
    batch, dim = dense.shape
    n = 1 + sparse.shape[1] // dim
    vectors = torch.cat([dense, sparse], dim=1).double().view(batch, n, dim)
    if upper:
        pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    else:
        pairs = [(i, j) for i in range(n) for j in range(i)]
    columns = [dense.double()]
    columns += [(vectors[:, i] * vectors[:, j]).sum(dim=1, keepdim=True) for i, j in pairs]
    return torch.cat(columns, dim=1).float()


def linear_bf16(input: Tensor, weight: Tensor, bias: Tensor, *, relu: bool = False) -> Tensor:  # noqa: A002 - torch's name for it
    """The dense layer with bfloat16 weights and inputs, to the bit where nothing is subnormal.

    Sums of even and of odd inputs, 32 inputs at a time, are added to the bias one after the other.
    A product of two bfloat16 numbers is exact in float32, so a multiply-add is that product and
    one rounded addition.

    Args:
        input: ``[B, K]`` float32.
        weight: ``[N, K]``, as in `torch.nn.Linear`; rounded to bfloat16.
        bias: ``[N]`` float32.
        relu: whether a ReLU follows.

    Returns:
        ``[B, N]`` float32.
    """
    x = input.bfloat16().float()
    w = weight.bfloat16().float()
    total = bias.expand(len(x), -1)
    for begin in range(0, x.shape[1], 32):
        halves = [x.new_zeros(len(x), len(w)), x.new_zeros(len(x), len(w))]
        for k in range(begin, min(begin + 32, x.shape[1])):
            halves[k % 2] = halves[k % 2] + x[:, k : k + 1] * w[:, k]
        total = total + (halves[0] + halves[1])
    return total.relu() if relu else total.clone()


def cross_layer(x0: Tensor, x: Tensor, v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """DCN's layer ``x0 * (v weight' + bias) + x`` in float64, rounded once to bfloat16."""
    wide = v.double() @ weight.double().t() + bias.double()
    return (x0.double() * wide + x.double()).to(torch.bfloat16)


FLOAT8 = torch.float8_e4m3fn
LARGEST_FLOAT8 = 448.0


def to_float8(values: Tensor) -> Tensor:
    """Rounded to e4m3, ties to even; beyond the largest number that."""
    return values.clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8)


def linear_fp8(  # noqa: PLR0917 - the operator's order
    input: Tensor,  # noqa: A002 - torch's name for it
    weight: Tensor,
    bias: Tensor | None,
    scales: Tensor,
    relu: bool = False,  # noqa: FBT001, FBT002
    dtype: torch.dtype = FLOAT8,
) -> Tensor:
    """A layer of e4m3 numbers in float64, rounded once: ``[B, N]`` e4m3 or bfloat16."""
    result = input.double() @ weight.double().t() * scales[::4].double().prod()
    if bias is not None:
        result += bias.double()
    if relu:
        result = result.relu()
    return to_float8(result) if dtype == FLOAT8 else result.to(dtype)


def cross_layer_fp8(  # noqa: PLR0917 - the operator's order
    x0: Tensor, x: Tensor, v: Tensor, weight: Tensor, bias: Tensor, scales: Tensor
) -> Tensor:
    """A cross layer of e4m3 numbers in float64, rounded once: ``[B, N]`` e4m3."""
    first, second = scales[::4].double()
    layer = v.double() @ weight.double().t() * first + bias.double()
    return to_float8(x0.double() * layer + x.double() * second)


def linear_thin(  # noqa: PLR0917 - the operator's order
    input: Tensor,  # noqa: A002 - torch's name for it
    weight: Tensor,
    bias: Tensor,
    relu: bool = False,  # noqa: FBT001, FBT002
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> Tensor:
    """A layer in float64, rounded once: ``[B, N]``."""
    result = input.double() @ weight.double().t() + bias.double()
    if relu:
        result = result.relu()
    return to_float8(result * scale) if dtype == FLOAT8 else result.to(dtype)


def exchange_rows(storage: Tensor, rows: Tensor, values: Tensor, offset: int, stride: int) -> None:
    """`torch.ops.tessera.exchange_rows`, one row after the other."""
    width = values.shape[1]
    for row, value in zip(rows.tolist(), values, strict=True):
        place = storage[offset + row * stride :][:width]
        kept = place.clone()
        place.copy_(value)
        value.copy_(kept)


def exchange_rows_of(
    storages: Sequence[Tensor],
    rows: Sequence[Tensor],
    values: Sequence[Tensor],
    offsets: Sequence[int],
    strides: Sequence[int],
) -> None:
    """`torch.ops.tessera.exchange_rows_of`, one patch after the other."""
    for patch in zip(storages, rows, values, offsets, strides, strict=True):
        exchange_rows(*patch)
