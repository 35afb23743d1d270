"""Our CUDA lookups and FBGEMM's on the same tables, interleaved in one run.

    python -m tessera.kernels.bench.gpu_lookup [--shapes multihot,oneid,uniform20] [--out FILE.json]

Tables are random bytes in FBGEMM's layout; ours are converted from them, so both read the same
values.  Every launch gets fresh ids (8 sets in turn).  FBGEMM is measured as its bare operator,
which trusts its ids, and behind its own bounds check, which is what its module runs and the
promise that ours keeps.  Times are medians of rounds in which every contender runs once.

The multi-hot shape needs 110 GB of device memory; fbgemm-gpu must be importable.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.kernels.row_types import BLOCK_INT8, FLOAT16, INT4, INT8, RowType
from tessera.kernels.tables import (
    TABLE_SCALE_SHIFT,
    FeatureLookup,
    TableRows,
    make_plan,
    pack_tables,
)

DIM = 128
ID_SETS = 8
ROUNDS = 7
SECTOR_BYTES = 32

# MLPerf's DLRM-DCNv2: rows (capped at 40M) and ids per sample of its 26 tables.
MLPERF_ROWS = [
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
]
MLPERF_IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]


@dataclass(frozen=True)
class Shape:
    """Tables and how many ids a sample has in each."""

    rows: list[int]
    ids: list[int]


SHAPES = {
    "multihot": Shape(MLPERF_ROWS, MLPERF_IDS),
    "oneid": Shape(MLPERF_ROWS, [1] * 26),
    "uniform20": Shape([10_000_000] * 10, [20] * 10),
}
FBGEMM_TYPES = {FLOAT16: 1, INT8: 2, INT4: 3}
HEADER_BYTES = {FLOAT16: 0, INT8: 4, INT4: 4}
DATA_BYTES = {FLOAT16: 256, INT8: 128, INT4: 64}

Launch = Callable[[int], Any]


def fbgemm_rows(rows: int, weight_type: RowType) -> Tensor:
    """Random rows in FBGEMM's GPU layout (16-byte multiples): uint8 [rows, stride]."""
    header, data = HEADER_BYTES[weight_type], DATA_BYTES[weight_type]
    stride = -(-(header + data) // 16) * 16
    table = torch.empty(rows, stride, dtype=torch.uint8, device="cuda")
    table.random_(0, 256)
    if header:
        pairs = torch.rand(rows, 2, device="cuda").mul_(0.01).add_(0.001).half()
        table[:, :4] = pairs.view(torch.uint8)
    else:
        table[:, 1::2] &= 0xBF  # no infinities: magnitudes stay under 2
    return table


BOOK = tuple(0.001 * 1.2**k for k in range(16))
"""A table's scales where its rows are BLOCK_INT8."""


@dataclass(frozen=True)
class Layout:
    """Where our tables keep their scales.

    Attributes:
        scale_shift: rows that share a scale, as a power of two.
        beside: a row's scale behind its bytes instead of in an array of its own.
        blocks: in the rows, a code per 16 columns: the same bytes read as BLOCK_INT8.
    """

    scale_shift: int = 0
    beside: bool = False
    blocks: bool = False

    @property
    def row_scale(self) -> bool:
        """Whether each row has a scale outside its data."""
        return self.scale_shift == 0 and not self.blocks


def our_tables(
    flat: Tensor, shape: Shape, weight_type: RowType, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Weights and plan converted from FBGEMM's rows [total rows, stride]."""
    scale_shift = layout.scale_shift
    tables, start = [], 0
    header, data = HEADER_BYTES[weight_type], DATA_BYTES[weight_type]
    for rows in shape.rows:
        mine = flat[start : start + rows]
        scale = mine[:, :4].contiguous().view(torch.float16)[:: 1 << min(scale_shift, 30)]
        if layout.blocks:
            scale = torch.tensor(BOOK, device=flat.device)
        tables.append(
            TableRows(
                data=mine[:, header : header + data],
                weight_type=BLOCK_INT8 if layout.blocks else weight_type,
                dim=DIM,
                scale=scale if header else None,
                scale_shift=scale_shift if header else 0,
            )
        )
        start += rows
    packed = pack_tables(tables, scale_beside=layout.beside)
    plan = make_plan(
        [
            FeatureLookup(table=place, out_column=DIM * f, expected_ids=shape.ids[f])
            for f, place in enumerate(packed.places)
        ]
    )
    return packed.weights, plan


def draw_ids(rows: int, count: int, *, power_law: bool) -> Tensor:
    """Ids of one feature: uniform, or of a power law (alpha 1.05) scattered over the table."""
    if not power_law:
        return torch.randint(0, rows, (count,), dtype=torch.int32, device="cuda")
    exponent = 1 - 1.05
    u = torch.rand(count, device="cuda", dtype=torch.float64)
    rank = ((float(rows) ** exponent - 1) * u + 1).pow(1 / exponent).long() - 1
    ids: Tensor = rank.clamp(0, rows - 1) * 2654435761 % rows
    return ids.int()


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
         columns: Tensor, width: int, d4: int, d8: int, d16: int, ids: Tensor, offsets: Tensor):
    return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        weights, empty, places, starts, types, columns, width, 0, d4, d8, d16, 0, ids, offsets,
        0, None, 1, None, None, 16, 0, -1, -1)

def checked(weights: Tensor, empty: Tensor, places: Tensor, starts: Tensor, types: Tensor,
            columns: Tensor, width: int, d4: int, d8: int, d16: int, rows: Tensor,
            warning: Tensor, ids: Tensor, offsets: Tensor):
    torch.ops.fbgemm.bounds_check_indices(rows, ids, offsets, 1, warning)
    return torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        weights, empty, places, starts, types, columns, width, 0, d4, d8, d16, 0, ids, offsets,
        0, None, 1, None, None, 16, 0, -1, -1)
"""
"""The operators as a TorchScript program calls them; dtype 5 is float16."""


def fbgemm_arguments(flat: Tensor, shape: Shape, weight_type: RowType) -> tuple[Any, ...]:
    """What FBGEMM's operator takes before ids and offsets."""
    count = len(shape.rows)
    stride = flat.shape[1]
    starts = [0]
    for rows in shape.rows[:-1]:
        starts.append(starts[-1] + rows * stride)
    return (
        flat.view(-1),
        torch.empty(0, dtype=torch.uint8, device="cuda"),
        torch.zeros(count, dtype=torch.int32, device="cuda"),
        torch.tensor(starts, device="cuda"),
        torch.full((count,), FBGEMM_TYPES[weight_type], dtype=torch.uint8, device="cuda"),
        torch.arange(count + 1, dtype=torch.int32, device="cuda") * DIM,
        count * DIM,
        DIM if weight_type is INT4 else 0,
        DIM if weight_type is INT8 else 0,
        DIM if weight_type is FLOAT16 else 0,
    )


def must_move_bytes(shape: Shape, weight_type: RowType, batch: int, *, row_scale: bool) -> int:
    """Bytes of a call: whole 32-byte sectors of rows, ids, offsets and the result."""
    row = -(-DATA_BYTES[weight_type] // SECTOR_BYTES) * SECTOR_BYTES
    row += SECTOR_BYTES if row_scale and HEADER_BYTES[weight_type] else 0
    per_sample = sum(shape.ids) * (row + 4) + len(shape.ids) * (4 + 2 * DIM)
    return batch * per_sample


def copy_bandwidth() -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    microseconds = median_us({"copy": lambda _: target.copy_(source)})["copy"]
    return 2 * source.numel() / microseconds * 1e6


def largest_difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def check_blocks(ours: Tensor, flat: Tensor, shape: Shape, ids: Tensor) -> None:
    """Hold the first samples of BLOCK_INT8 rows to torch's own arithmetic."""
    samples = 64
    batch = ours.shape[0]
    book = torch.tensor(BOOK, device=flat.device)
    powers = torch.tensor([1, 2, 4, 8], device=flat.device)
    first_id = first_row = 0
    for f, (rows, per_bag) in enumerate(zip(shape.rows, shape.ids, strict=True)):
        used = first_row + ids[first_id : first_id + samples * per_bag].long()
        blocks = flat[used, 4 : 4 + DIM].view(-1, DIM // 16, 16)
        scales = book[((blocks[:, :, :4] & 1) * powers).sum(2)]
        values = ((blocks.float() - 128) * scales[..., None]).view(samples, per_bag, DIM).sum(1)
        error = largest_difference(ours[:samples, DIM * f : DIM * (f + 1)], values)
        if error > 2e-3:  # the result's fp16 rounding
            raise AssertionError(f"feature {f}: blocks are summed wrongly, by {error:g}")
        first_id += batch * per_bag
        first_row += rows


def measure(
    name: str, weight_type: RowType, *, power_laws: list[bool], bandwidth: float
) -> list[dict[str, Any]]:
    """All batch sizes and layouts of one shape and weight type."""
    shape = SHAPES[name]
    flat = fbgemm_rows(sum(shape.rows), weight_type)
    layouts = {"row scale": Layout()}
    if weight_type is INT4:
        layouts["row scale beside"] = Layout(beside=True)
    if weight_type is INT8:
        layouts |= {
            "scale in the row": Layout(blocks=True),
            "scale per 64 rows": Layout(scale_shift=6),
            "scale per table": Layout(scale_shift=TABLE_SCALE_SHIFT),
        }
    tables = {
        label: our_tables(flat, shape, weight_type, layout) for label, layout in layouts.items()
    }
    theirs = fbgemm_arguments(flat, shape, weight_type)
    results = []
    for batch in (16384, 256):
        for power_law in power_laws:
            jagged = draw_jagged(shape, batch, power_law=power_law)
            contenders = contenders_of(shape, tables, theirs, jagged)
            error = largest_difference(contenders["row scale"](0), contenders["fbgemm"](0))
            if error > 2e-3:  # two fp16 roundings of the result
                raise AssertionError(f"{name} {weight_type.name}: results differ by {error:g}")
            if "scale in the row" in contenders:
                check_blocks(contenders["scale in the row"](0), flat, shape, jagged[0][0])
            many = batch > 1000
            row = {
                "shape": name,
                "weights": weight_type.name,
                "batch": batch,
                "ids": "power law" if power_law else "uniform",
                "us": median_us(contenders, launches=ID_SETS * (1 if many else 25)),
                "must_move_bytes": {
                    label: must_move_bytes(
                        shape, weight_type, batch, row_scale=layouts[label].row_scale
                    )
                    for label in layouts
                },
            }
            if not many:
                graphs = {label: graph_of(launch) for label, launch in contenders.items()}
                row["graph_us"] = median_us(graphs, launches=ID_SETS * 10)
            results.append(row)
            report(row, bandwidth)
    return results


def draw_jagged(shape: Shape, batch: int, *, power_law: bool) -> tuple[list[Tensor], Tensor]:
    """Id sets and the bag starts that they share, int32."""
    lengths = torch.tensor(shape.ids).repeat_interleave(batch)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().cuda()
    features = list(zip(shape.rows, shape.ids, strict=True))
    sets = [
        torch.cat([draw_ids(rows, batch * ids, power_law=power_law) for rows, ids in features])
        for _ in range(ID_SETS)
    ]
    return sets, offsets


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
    width = DIM * len(shape.rows)
    for label, (weights, plan) in tables.items():
        hint = ops.launch_hint(plan)
        contenders[label] = calling(unit.ours, weights, plan.cuda(), width, hint)
    return contenders


def report(row: dict[str, Any], bandwidth: float) -> None:
    """One measured call as lines of a table."""
    head = f"{row['shape']:<10}{row['weights']:<8}B={row['batch']:<6}{row['ids']:<10}"
    for kind in ("us", "graph_us"):
        if kind not in row:
            continue
        times = row[kind]
        for label, value in times.items():
            line = f"{head}{'graph ' if kind == 'graph_us' else ''}{label:<20}{value:8.1f} us"
            if not label.startswith("fbgemm"):
                line += f"  {times['fbgemm'] / value:5.2f}x bare"
                line += f"  {times['fbgemm + check'] / value:5.2f}x checked"
                share = row["must_move_bytes"][label] / (value * 1e-6) / bandwidth
                line += f"  {100 * share:4.0f}% of copy"
            print(line, flush=True)


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    import fbgemm_gpu  # noqa: F401, PLC0415 (the peer, only here)

    ops.load()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}; device copy {bandwidth / 1e12:.2f} TB/s")
    results = []
    for name in args.shapes.split(","):
        for weight_type in (INT8, INT4, FLOAT16):
            power_laws = [False, True] if weight_type is INT8 else [False]
            results += measure(name, weight_type, power_laws=power_laws, bandwidth=bandwidth)
            gc.collect()  # closures that hold the tables
            torch.cuda.empty_cache()
    if args.out:
        document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": results}
        args.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
