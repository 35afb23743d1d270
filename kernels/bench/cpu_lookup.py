"""Our CPU lookups and interaction against FBGEMM's and torch's, one thread, interleaved.

    python -m tessera.kernels.bench.cpu_lookup [--rows 1000000] [--out FILE.json]

Both read FBGEMM's int8 rows (fp16 scale, fp16 bias, bytes).  A third contender reads the same memory
as rows with their scales inside (BLOCK_INT8), one cache line each.  Every call
gets fresh random ids, so with tables larger than the caches each row is cold.  A round calls every
contender once, in turn; the figure is the median over the rounds.  All is measured twice: in 4 KiB
pages, and after the tables were moved to 2 MiB pages, as far as the system can.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.kernels import ops
from tessera.kernels.memory import use_huge_pages
from tessera.kernels.plan import BOOK_SCALES, ScaleType
from tessera.kernels.row_types import BLOCK_INT8, INT8
from tessera.kernels.tables import FeatureLookup, TablePlace, fbgemm_place, make_plan

DIM = 64
STRIDE = 4 + DIM
Call = Callable[[Tensor, Tensor, Tensor], Any]


def processor() -> str:
    """The processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def random_memory(rows: int) -> Tensor:
    """Random int8 rows in FBGEMM's CPU layout (68 bytes each), then a book: uint8."""
    book = torch.linspace(0.0001, 0.01, BOOK_SCALES).view(torch.uint8)
    memory = torch.empty(rows * STRIDE + book.numel(), dtype=torch.uint8)
    table = memory[: rows * STRIDE].view(rows, STRIDE)
    table.random_(0, 256)
    table[:, :4] = torch.rand(rows, 2).mul_(0.01).add_(0.001).half().view(torch.uint8)
    memory[rows * STRIDE :] = book
    return memory


def fbgemm_call(flat: Tensor, tables: int, rows: int) -> Call:
    """FBGEMM's operator on all tables, float32 out."""
    lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
    empty = torch.empty(0, dtype=torch.uint8)
    places = torch.full((tables,), 3, dtype=torch.int32)
    starts = torch.arange(tables) * rows * STRIDE
    types = torch.full((tables,), 2, dtype=torch.uint8)
    columns = torch.arange(tables + 1, dtype=torch.int32) * DIM
    fixed = (flat, empty, places, starts, types, columns, tables * DIM, 0, 0, DIM, 0, 0)

    def call(ids: Tensor, _lengths: Tensor, offsets: Tensor) -> Any:
        return lookup(*fixed, ids, offsets, 0, None, 0, None, None, 1, 0, -1, -1)

    return call


def our_call(weights: Tensor, plan: Tensor) -> Call:
    """Our operator, taking lengths."""
    lookup = torch.ops.tessera.lookup
    width = int(plan.shape[0]) * DIM

    def call(ids: Tensor, lengths: Tensor, _offsets: Tensor) -> Any:
        return lookup(weights, plan, ids, lengths, width)

    return call


def medians_us(contenders: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, float]:
    """Median time of each contender (us); round k calls all with argument k, in turning order."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for k in range(rounds + 5):
        turn = names[k % len(names) :] + names[: k % len(names)]
        for name in turn:
            begin = time.perf_counter_ns()
            contenders[name](k)
            if k >= 5:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def lookup_calls(tables: int, rows: int) -> tuple[dict[str, Call], Tensor]:
    """The contenders on ``tables`` tables of ``rows`` rows, and the memory that all of them read."""
    memory = random_memory(tables * rows)
    in_place = make_plan(
        [
            FeatureLookup(
                table=fbgemm_place(
                    offset=t * rows * STRIDE,
                    row_stride=STRIDE,
                    rows=rows,
                    dim=DIM,
                    weight_type=INT8,
                ),
                out_column=t * DIM,
            )
            for t in range(tables)
        ]
    )
    # The same memory read as rows with their scales inside, a cache line each; the book is last.
    in_blocks = make_plan(
        [
            FeatureLookup(
                table=TablePlace(
                    data_offset=t * rows * DIM,
                    row_stride=DIM,
                    rows=rows,
                    dim=DIM,
                    weight_type=BLOCK_INT8,
                    scale_offset=tables * rows * STRIDE,
                    scale_type=ScaleType.BOOK,
                ),
                out_column=t * DIM,
            )
            for t in range(tables)
        ]
    )
    contenders = {
        "fbgemm": fbgemm_call(memory, tables, rows),
        "ours": our_call(memory, in_place),
        "in blocks": our_call(memory, in_blocks),
    }
    return contenders, memory


def taking_turns(
    call: Call, ids: list[Tensor], shift: int, lengths: Tensor, offsets: Tensor
) -> Callable[[int], Any]:
    """``call`` as a function of the round's number, on id sets that start at ``shift``."""
    return lambda k: call(ids[(k + shift) % len(ids)], lengths, offsets)


def measure_lookups(
    calls: dict[str, Call], tables: int, rows: int, seconds: float, pages: str
) -> list[dict[str, Any]]:
    """Every contender at four batch sizes and two bag lengths, on the pages that there are."""
    results = []
    for per_bag in (1, 10):
        for batch in (1, 8, 64, 512):
            lengths = torch.full((tables * batch,), per_bag, dtype=torch.int32)
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
            count = tables * batch * per_bag
            rounds = max(15, min(600, int(seconds / (4 * count * 60e-9 + 50e-6))))
            # Far more sets than any cache holds rows of.  Contenders that share memory are a
            # quarter of the sets apart, so none finds rows that another has just read.
            ids = [torch.randint(0, rows, (count,), dtype=torch.int32) for _ in range(rounds)]
            turns = {
                name: taking_turns(call, ids, n * rounds // len(calls), lengths, offsets)
                for n, (name, call) in enumerate(calls.items())
            }
            theirs, ours = (calls[name](ids[0], lengths, offsets) for name in ("fbgemm", "ours"))
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
            times = medians_us(turns, rounds)
            results.append({"pages": pages, "batch": batch, "ids_per_bag": per_bag, "us": times})
            line = "  ".join(
                f"{name} {value:8.1f} us ({times['fbgemm'] / value:4.2f}x)"
                for name, value in times.items()
            )
            print(f"{pages} pages  B={batch:<4} {per_bag:>2} ids a bag  {line}", flush=True)
    return results


def torch_interaction(dense: Tensor, sparse: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The interaction in torch's operators: cat, bmm, and the lower triangle by index."""
    batch, dim = dense.shape
    vectors = torch.cat([dense, sparse], dim=1).view(batch, -1, dim)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    chosen = products.index_select(1, first * vectors.shape[1] + second)
    return torch.cat([dense, chosen], dim=1)


def interaction_calls(
    sets: list[tuple[Tensor, Tensor]], pairs: tuple[Tensor, Tensor]
) -> dict[str, Callable[[int], Any]]:
    """Both contenders as functions of the input set's number."""
    return {
        "torch": lambda k: torch_interaction(*sets[k % len(sets)], *pairs),
        "tessera": lambda k: torch.ops.tessera.dot_interaction(*sets[k % len(sets)]),
    }


def measure_interaction(tables: int) -> list[dict[str, Any]]:
    """DLRM's interaction at three batch sizes."""
    first, second = torch.tril_indices(tables + 1, tables + 1, offset=-1).unbind()
    results = []
    for batch in (1, 64, 512):
        sets = [(torch.randn(batch, DIM), torch.randn(batch, tables * DIM)) for _ in range(8)]
        contenders = interaction_calls(sets, (first, second))
        torch.testing.assert_close(contenders["torch"](0), contenders["tessera"](0))
        times = medians_us(contenders, 300 if batch < 100 else 100)
        results.append({"batch": batch, "us": times})
        ratio = times["torch"] / times["tessera"]
        print(
            f"interaction  B={batch:<4} torch {times['torch']:8.1f} us  "
            f"tessera {times['tessera']:8.1f} us  {ratio:4.2f}x",
            flush=True,
        )
    return results


def main() -> int:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of a table (%(default)s)")
    parser.add_argument("--tables", type=int, default=26, help="how many (%(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="about, per line (%(default)s)")
    parser.add_argument("--out", type=Path, help="write all figures to this JSON file")
    args = parser.parse_args()
    import fbgemm_gpu  # noqa: F401, PLC0415 (the peer, only here)

    # Both page kinds are measured: the operators must not ask for huge pages by themselves.
    os.environ["TESSERA_HUGE_PAGES"] = "0"
    ops.load()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = f"{processor()}, torch {torch.__version__}, 1 thread"
    print(machine)
    interaction = measure_interaction(args.tables)
    calls, memory = lookup_calls(args.tables, args.rows)
    measure = functools.partial(measure_lookups, calls, args.tables, args.rows, args.seconds)
    lookups = measure("4 KiB")
    moved = use_huge_pages(memory)
    print(f"moved to huge pages: {100 * moved:.0f}%")
    lookups += measure("2 MiB")
    document = {
        "machine": machine,
        "interaction": interaction,
        "lookup": lookups,
        "moved_to_huge_pages": moved,
    }
    if args.out:
        args.out.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
