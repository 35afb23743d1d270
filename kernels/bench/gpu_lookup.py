"""Our CUDA lookups and FBGEMM's on the same tables, interleaved in one run.

    python -m tessera.kernels.bench.gpu_lookup [--shapes multihot,oneid,uniform20] [--out FILE.json]
        [--random N] [--seed S]

Every launch gets fresh ids (8 sets in turn).  FBGEMM is measured as its bare operator, which trusts
its ids, and behind its own bounds check, which is what its module runs and the promise that ours
keeps.  Times are medians of rounds in which every contender runs once.  After the fixed shapes come
``--random`` shapes drawn from ``--seed``, and the worst of them.

The multi-hot shape needs 110 GB of device memory; fbgemm-gpu must be importable.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from tessera.kernels import ops
from tessera.kernels.bench.gpu_contenders import (
    ID_SETS,
    Layout,
    Shape,
    check_blocks,
    contenders_of,
    copy_bandwidth,
    draw_jagged,
    fbgemm_arguments,
    fbgemm_tables,
    graph_of,
    largest_difference,
    median_us,
    must_move_bytes,
    our_tables,
)
from tessera.kernels.row_types import FLOAT8, FLOAT16, INT4, INT8, RowType
from tessera.kernels.tables import TABLE_SCALE_SHIFT

DIM = 128

# MLPerf's DLRM-DCNv2: rows (capped at 40M) and ids per sample of its 26 tables.
MLPERF_ROWS = [
    *(40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10),
    *(2209, 11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36),
]
MLPERF_IDS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]

SHAPES = {
    "multihot": Shape(MLPERF_ROWS, MLPERF_IDS, [DIM] * 26),
    "oneid": Shape(MLPERF_ROWS, [1] * 26, [DIM] * 26),
    "uniform20": Shape([10_000_000] * 10, [20] * 10, [DIM] * 10),
}
FBGEMM_ERROR = 2e-3  # two fp16 roundings of the result
RATIO_AIM, COPY_AIM = 1.5, 0.8
"""The aims for random shapes: times as fast as bare FBGEMM, or share of the copy's bandwidth."""
SMALL_BATCH = 1000  # under which launches are also measured in a captured graph

# What a random shape may take.
MOST_TABLE_BYTES = 12 << 30
MOST_IDS = 16_000_000
MOST_OUT_BYTES = 3 << 30


def layouts_of(weight_type: RowType, *, fixed: bool) -> dict[str, Layout]:
    """The layouts to measure of a weight type, by label; the first one holds FBGEMM's values."""
    layouts = {"row scale": Layout()}
    if weight_type in (INT8, INT4) and not fixed:
        layouts["as packaged"] = Layout(beside=None)
    # The multi-hot tables do not fit in the device's memory once more.
    if weight_type is INT4 or (weight_type is INT8 and not fixed):
        layouts["row scale beside"] = Layout(beside=True)
    if weight_type is INT8:
        layouts["scale in the row"] = Layout(blocks=True)
        if fixed:
            layouts["scale per 64 rows"] = Layout(scale_shift=6)
            layouts["scale per table"] = Layout(scale_shift=TABLE_SCALE_SHIFT)
    return layouts


def measure(
    name: str,
    shape: Shape,
    weight_type: RowType,
    layouts: dict[str, Layout],
    calls: list[tuple[int, bool]],
) -> list[dict[str, Any]]:
    """One shape and weight type in all layouts, for each batch size and whether of a power law."""
    tables = fbgemm_tables(shape, weight_type)
    ours = {
        label: our_tables(tables, shape, weight_type, layout) for label, layout in layouts.items()
    }
    theirs = fbgemm_arguments(tables, shape, weight_type)
    results = []
    for batch, power_law in calls:
        jagged = draw_jagged(shape, batch, power_law=power_law)
        contenders = contenders_of(shape, ours, theirs, jagged)
        for label, layout in layouts.items():
            if not layout.row_scale:
                continue
            error = largest_difference(contenders[label](0), contenders["fbgemm"](0))
            if not error <= FBGEMM_ERROR:
                raise AssertionError(
                    f"{name} {weight_type.name} {label}: results differ by {error:g}"
                )
        if "scale in the row" in contenders:
            check_blocks(contenders["scale in the row"](0), tables, shape, jagged)
        small = batch < SMALL_BATCH
        row = {
            "shape": name,
            "weights": weight_type.name,
            "batch": batch,
            "ids": "power law" if power_law else "uniform",
            "us": median_us(contenders, launches=ID_SETS * (25 if small else 1)),
            "must_move_bytes": {
                label: must_move_bytes(shape, weight_type, jagged[1], row_scale=layout.row_scale)
                for label, layout in layouts.items()
            },
        }
        if small:
            graphs = {label: graph_of(launch) for label, launch in contenders.items()}
            row["graph_us"] = median_us(graphs, launches=ID_SETS * 10)
        results.append(row)
    return results


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


def draw_shape(seed: int) -> tuple[Shape, RowType, int, bool]:
    """A shape, a weight type, a batch size and whether ids follow a power law.

    Widths are multiples of 4 from 4 to 1,024, one for all tables or a mixture; bags hold 1 to 300
    ids; batches have 1 to 65,536 samples.  Draws that would take more memory than the limits above
    are drawn again.
    """
    rng = random.Random(seed)  # noqa: S311 (shapes to measure, not secrets)

    def logarithmic(low: float, high: float) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    while True:
        count = logarithmic(1, 40)
        one_dim, one_id = rng.random() < 0.5, rng.random() < 0.4
        dims = [4 * logarithmic(1, 256) for _ in range(count)]
        ids = [1 if one_id else logarithmic(1, 300) for _ in range(count)]
        shape = Shape(
            rows=[logarithmic(100, 20_000_000) for _ in range(count)],
            ids=ids,
            dims=[dims[0]] * count if one_dim else dims,
            jagged=rng.random() < 0.5,
        )
        kinds = (INT8, INT8, INT4, FLOAT16)
        weight_type = rng.choice([*kinds, FLOAT8])
        batch, power_law = logarithmic(1, 65536), rng.random() < 0.5
        element = 2 if weight_type is FLOAT16 else 1
        table_bytes = sum(
            rows * (element * dim + 16) for rows, dim in zip(shape.rows, shape.dims, strict=True)
        )
        if (
            table_bytes <= MOST_TABLE_BYTES
            and batch * sum(ids) <= MOST_IDS
            and 2 * batch * sum(shape.dims) <= MOST_OUT_BYTES
        ):
            return shape, weight_type, batch, power_law


def score(row: dict[str, Any], label: str, bandwidth: float) -> tuple[float, float, float]:
    """How near a contender is to the aim (1: reached), times bare FBGEMM, share of the copy.

    In a captured graph where the batch is small: there the processor's time does not hide ours.
    """
    times = row.get("graph_us", row["us"])
    ratio = times["fbgemm"] / times[label]
    share = row["must_move_bytes"][label] / (times[label] * 1e-6) / bandwidth
    return max(ratio / RATIO_AIM, share / COPY_AIM), ratio, share


def describe(shape: Shape) -> str:
    """A shape in a few words."""
    dims = f"{min(shape.dims)}-{max(shape.dims)}" if len(set(shape.dims)) > 1 else shape.dims[0]
    ids = f"{min(shape.ids)}-{max(shape.ids)}" if len(set(shape.ids)) > 1 else shape.ids[0]
    return f"{len(shape.dims)} x D={dims}, ids {'about ' if shape.jagged else ''}{ids}"


def measure_random(first_seed: int, count: int, bandwidth: float) -> list[dict[str, Any]]:
    """Measure shapes of seeds from ``first_seed`` on; print each and then the worst."""
    results = []
    ranked = []
    for seed in range(first_seed, first_seed + count):
        shape, weight_type, batch, power_law = draw_shape(seed)
        layouts = layouts_of(weight_type, fixed=False)
        row = measure(f"seed {seed}", shape, weight_type, layouts, [(batch, power_law)])[0]
        row["tables"] = {"rows": shape.rows, "ids": shape.ids, "dims": shape.dims}
        results.append(row)
        for label in layouts:
            reached, ratio, share = score(row, label, bandwidth)
            times = row.get("graph_us", row["us"])
            line = (
                f"seed {seed:<5}{weight_type.name:<8}{label:<17}{describe(shape):<34}B={batch:<6}"
                f"{row['ids']:<10}{times['fbgemm']:9.1f} {times[label]:9.1f} us{ratio:6.2f}x bare"
                f"{row['us']['fbgemm'] / row['us'][label]:6.2f}x scripted{100 * share:5.0f}% of copy"
            )
            print(line, flush=True)
            ranked.append((reached, ratio, line))
        gc.collect()  # closures that hold the tables
        torch.cuda.empty_cache()
    below = [line for reached, _, line in sorted(ranked) if reached < 1]
    print(f"\n{len(ranked)} random calls, {len(below)} below the aim; the worst:")
    print("\n".join(below[:20]))
    slower = [line for _, ratio, line in sorted(ranked) if ratio < 1]
    print(f"\n{len(slower)} slower than bare FBGEMM:")
    print("\n".join(slower))
    return results


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument("--random", type=int, default=60, help="shapes to draw (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one (default: 0)")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    import fbgemm_gpu  # noqa: F401, PLC0415 (the peer, only here)

    ops.load()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{machine}; device copy {bandwidth / 1e12:.2f} TB/s")
    results = []
    for name in filter(None, args.shapes.split(",")):
        for weight_type in (INT8, INT4, FLOAT16):
            power_laws = [False, True] if weight_type is INT8 else [False]
            calls = [(batch, law) for batch in (16384, 256) for law in power_laws]
            layouts = layouts_of(weight_type, fixed=True)
            for row in measure(name, SHAPES[name], weight_type, layouts, calls):
                report(row, bandwidth)
                results.append(row)
            gc.collect()
            torch.cuda.empty_cache()
    results += measure_random(args.seed, args.random, bandwidth)
    if args.out:
        document = {"machine": machine, "copy_bytes_per_s": bandwidth, "results": results}
        args.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
