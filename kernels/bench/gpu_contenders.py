"""FBGEMM's CUDA lookup and ours over the same tables, as functions of a set of ids.

Tables are random bytes in FBGEMM's layout; ours are converted from them, so both read the same
values.  Called from TorchScript, with fp16 out, as a served model calls them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.kernels.row_types import BLOCK_INT8, FLOAT8, FLOAT16, INT4, INT8, RowType
from tessera.kernels.tables import (
    DEFAULT_ROW_ALIGNMENT_BYTES,
    FeatureLookup,
    TableRows,
    make_plan,
    pack_tables,
)

ID_SETS = 8
ROUNDS = 7
SECTOR_BYTES = 32
BOOK = tuple(0.001 * 1.2**k for k in range(16))
"""A table's scales where its rows are BLOCK_INT8."""

_FBGEMM_TYPES = {
    FLOAT16: 1,
    INT8: 2,
    INT4: 3,
    FLOAT8: 6,
}
_FP8_EXPONENT = (4, 7)
"""Bits and bias of e4m3."""

Launch = Callable[[int], Any]


def header_bytes(weight_type: RowType) -> int:
    """Bytes of scale and bias before the data of FBGEMM's rows."""
    return 0 if weight_type is FLOAT8 else weight_type.header_bytes


@dataclass(frozen=True)
class Shape:
    """Tables and how many ids a sample has in each.

    Attributes:
        rows: of each table.
        ids: of each table, the mean where ``jagged``.
        dims: columns of each table.
        jagged: bags hold between none and twice as many ids instead of all as many.
    """

    rows: list[int]
    ids: list[int]
    dims: list[int]
    jagged: bool = False


@dataclass(frozen=True)
class Layout:
    """Where our tables keep their scales.

    Attributes:
        scale_shift: rows that share a scale, as a power of two.
        beside: a row's scale behind its bytes instead of in an array of its own; None: as in packages.
        blocks: in the rows, a code per 16 columns: the same bytes read as BLOCK_INT8.
        row_alignment: bytes that rows start on multiples of.
    """

    scale_shift: int = 0
    beside: bool | None = False
    blocks: bool = False
    row_alignment: int = DEFAULT_ROW_ALIGNMENT_BYTES

    @property
    def row_scale(self) -> bool:
        """Whether each row has a scale outside its data."""
        return self.scale_shift == 0 and not self.blocks


def _stride(dim: int, weight_type: RowType) -> int:
    """Bytes of a row in FBGEMM's GPU layout."""
    return -(-(header_bytes(weight_type) + weight_type.data_bytes(dim)) // 16) * 16


def fbgemm_tables(shape: Shape, weight_type: RowType) -> list[Tensor]:
    """Random tables in FBGEMM's GPU layout, side by side in one buffer: uint8 [rows, stride]."""
    sizes = [
        rows * _stride(dim, weight_type) for rows, dim in zip(shape.rows, shape.dims, strict=True)
    ]
    flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cuda")
    flat.random_(0, 256)
    if weight_type in (FLOAT16, FLOAT8):
        # Neither infinities nor NaNs: magnitudes stay under 2.
        high = flat[1::2] if weight_type is FLOAT16 else flat
        high &= 0xBF
    tables = [
        part.view(rows, -1) for part, rows in zip(torch.split(flat, sizes), shape.rows, strict=True)
    ]
    if header_bytes(weight_type):
        for table in tables:
            pairs = torch.rand(len(table), 2, device="cuda").mul_(0.01).add_(0.001).half()
            table[:, :4] = pairs.view(torch.uint8)
    return tables


def our_tables(
    tables: list[Tensor], shape: Shape, weight_type: RowType, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Weights and plan converted from FBGEMM's rows."""
    scale_shift = layout.scale_shift
    header = header_bytes(weight_type)
    converted = []
    for table, dim in zip(tables, shape.dims, strict=True):
        data = table[:, header : header + weight_type.data_bytes(dim)]
        scale = table[:, :4].contiguous().view(torch.float16)[:: 1 << min(scale_shift, 30)]
        if layout.blocks:
            scale = torch.tensor(BOOK, device="cuda")
            data = data if dim % 16 == 0 else torch.nn.functional.pad(data, (0, -dim % 16))
        converted.append(
            TableRows(
                data=data,
                weight_type=BLOCK_INT8 if layout.blocks else weight_type,
                dim=dim,
                scale=scale if header else None,
                scale_shift=scale_shift if header else 0,
            )
        )
    packed = pack_tables(converted, scale_beside=layout.beside, row_alignment=layout.row_alignment)
    features, column = [], 0
    for place, dim, ids in zip(packed.places, shape.dims, shape.ids, strict=True):
        features.append(FeatureLookup(table=place, out_column=column, expected_ids=ids))
        column += dim
    return packed.weights, make_plan(features)


def draw_ids(rows: int, count: int, *, power_law: bool) -> Tensor:
    """Ids of one feature: uniform, or of a power law (alpha 1.05) scattered over the table."""
    if not power_law:
        return torch.randint(0, rows, (count,), dtype=torch.int32, device="cuda")
    exponent = 1 - 1.05
    u = torch.rand(count, device="cuda", dtype=torch.float64)
    rank = ((float(rows) ** exponent - 1) * u + 1).pow(1 / exponent).long() - 1
    ids: Tensor = rank.clamp(0, rows - 1) * 2654435761 % rows
    return ids.int()


def draw_jagged(shape: Shape, batch: int, *, power_law: bool) -> tuple[list[Tensor], Tensor]:
    """Id sets and the bag starts that they share, int32."""
    lengths = torch.tensor(shape.ids, device="cuda").repeat_interleave(batch)
    if shape.jagged:
        lengths = (torch.rand(len(lengths), device="cuda") * (2 * lengths + 1)).long()
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    counts = lengths.view(-1, batch).sum(1).tolist()
    sets = [
        torch.cat(
            [
                draw_ids(rows, count, power_law=power_law)
                for rows, count in zip(shape.rows, counts, strict=True)
            ]
        )
        for _ in range(ID_SETS)
    ]
    return sets, offsets


def median_us(contenders: dict[str, Launch], launches: int = ID_SETS) -> dict[str, float]:
    """Median time per launch (us) of each contender, all of them in every round."""
    for launch in contenders.values():
        for k in range(3):
            launch(k)
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, launch in contenders.items():
            begin, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            begin.record()
            for k in range(launches):
                launch(k % ID_SETS)
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / launches * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def graph_of(launch: Launch) -> Launch:
    """All id sets captured in one graph; a call with k = 0 replays it, others do nothing."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [launch(k) for k in range(ID_SETS)]

    def replay(k: int) -> list[Any]:
        if k == 0:
            graph.replay()
        return kept

    return replay


SCRIPTS = """
def ours(weights: Tensor, plan: Tensor, width: int, launch: int, ids: Tensor, offsets: Tensor):
    return torch.ops.tessera.lookup(
        weights, plan, ids, offsets, width, offsets=True, dtype=5, launch=launch)

def bare(weights: Tensor, empty: Tensor, places: Tensor, starts: Tensor, types: Tensor,
         columns: Tensor, width: int, d4: int, d8: int, d16: int, f8: int, bits: int, bias: int,
         ids: Tensor, offsets: Tensor):
    return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        weights, empty, places, starts, types, columns, width, 0, d4, d8, d16, 0, ids, offsets,
        0, None, 1, None, None, 16, f8, bits, bias)

def checked(weights: Tensor, empty: Tensor, places: Tensor, starts: Tensor, types: Tensor,
            columns: Tensor, width: int, d4: int, d8: int, d16: int, f8: int, bits: int, bias: int,
            rows: Tensor, warning: Tensor, ids: Tensor, offsets: Tensor):
    torch.ops.fbgemm.bounds_check_indices(rows, ids, offsets, 1, warning)
    return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        weights, empty, places, starts, types, columns, width, 0, d4, d8, d16, 0, ids, offsets,
        0, None, 1, None, None, 16, f8, bits, bias)
"""
"""The operators as a TorchScript program calls them; dtype 5 is float16."""


def fbgemm_arguments(tables: list[Tensor], shape: Shape, weight_type: RowType) -> tuple[Any, ...]:
    """What FBGEMM's operator takes before ids and offsets."""
    count, widest = len(tables), max(shape.dims)
    flat = tables[0].new_empty(0).set_(tables[0].untyped_storage())
    columns = torch.tensor([0, *shape.dims], device="cuda").cumsum(0).int()
    kinds = (INT4, INT8, FLOAT16, FLOAT8)
    return (
        flat,
        torch.empty(0, dtype=torch.uint8, device="cuda"),
        torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.tensor([table.storage_offset() for table in tables], device="cuda"),
        torch.full((count,), _FBGEMM_TYPES[weight_type], dtype=torch.uint8, device="cuda"),
        columns,
        sum(shape.dims),
        *(widest if weight_type is kind else 0 for kind in kinds),
        *(_FP8_EXPONENT if weight_type is FLOAT8 else (-1, -1)),
    )


def contenders_of(
    shape: Shape,
    tables: dict[str, tuple[Tensor, Tensor]],
    theirs: tuple[Any, ...],
    jagged: tuple[list[Tensor], Tensor],
) -> dict[str, Launch]:
    """Every contender as a function of the id set's number."""
    unit = torch.jit.CompilationUnit(SCRIPTS)
    sets, offsets = jagged
    bounds = (
        torch.tensor(shape.rows, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
    )

    def calling(function: Any, *arguments: Any) -> Launch:
        return lambda k: function(*arguments, sets[k], offsets)

    contenders = {
        "fbgemm": calling(unit.bare, *theirs),
        "fbgemm + check": calling(unit.checked, *theirs, *bounds),
    }
    for label, (weights, plan) in tables.items():
        hint = ops.launch_hint(plan)
        contenders[label] = calling(unit.ours, weights, plan.cuda(), sum(shape.dims), hint)
    return contenders


def must_move_bytes(shape: Shape, weight_type: RowType, offsets: Tensor, *, row_scale: bool) -> int:
    """Bytes of a call: whole 32-byte sectors of rows, ids, offsets and the fp16 result."""
    features = len(shape.dims)
    batch = (len(offsets) - 1) // features
    ends = offsets[::batch].tolist()
    total = 4 * (len(offsets) + ends[-1]) + 2 * batch * sum(shape.dims)
    for dim, begin, end in zip(shape.dims, ends, ends[1:], strict=False):
        row = -(-weight_type.data_bytes(dim) // SECTOR_BYTES) * SECTOR_BYTES
        row += SECTOR_BYTES if row_scale and header_bytes(weight_type) else 0
        total += (end - begin) * row
    return int(total)


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    microseconds = median_us({"copy": lambda _: target.copy_(source)})["copy"]
    return 2 * source.numel() / microseconds * 1e6


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest value."""
    if theirs.numel() == 0:
        return 0.0
    scale = theirs.float().abs().max().clamp(min=1e-6)
    return float((ours.float() - theirs.float()).abs().max() / scale)


def check_blocks(ours: Tensor, tables: list[Tensor], shape: Shape, jagged: Any) -> None:
    """Hold the first samples of BLOCK_INT8 rows to torch's own arithmetic."""
    sets, offsets = jagged
    batch = ours.shape[0]
    samples = min(batch, 64)
    book = torch.tensor(BOOK, device="cuda")
    powers = torch.tensor([1, 2, 4, 8], device="cuda")
    column = 0
    for f, (table, dim) in enumerate(zip(tables, shape.dims, strict=True)):
        bags = offsets[f * batch : f * batch + samples + 1].long()
        used = sets[0][bags[0] : bags[-1]].long()
        data = torch.nn.functional.pad(table[used, 4 : 4 + dim], (0, -dim % 16))
        blocks = data.view(-1, data.shape[1] // 16, 16)
        scales = book[((blocks[:, :, :4] & 1) * powers).sum(2)]
        rows = ((blocks.float() - 128) * scales[..., None]).flatten(1)[:, :dim]
        bag_of_row = torch.repeat_interleave(torch.arange(samples, device="cuda"), bags.diff())
        values = torch.zeros(samples, dim, device="cuda").index_add_(0, bag_of_row, rows)
        error = largest_difference(ours[:samples, column : column + dim], values)
        if not error <= 2e-3:  # the result's fp16 rounding
            raise AssertionError(f"feature {f}: blocks are summed wrongly, by {error:g}")
        column += dim
