"""Steps per second of sharded tables, beside TorchRec in the same processes.

Both libraries shard the same tables by the same plan on the same ranks and see the same batches:
look up, backward with a given gradient, update.  For each way of cutting tables they first take
the same steps from the same weights, and their outputs may differ by as much as float32 rounds
(`rounding_bound`); then they are timed in turn, a few steps each, round after round.  A number is
the median over the rounds, of the slowest rank.

On a machine without GPUs ranks are processes joined by gloo, with one thread each; with
``--device cuda`` each has a GPU and NCCL joins them.  TorchRec is measured if it is installed;
without it there are no ratios.

With ``--torchrec-kernel fused_triton`` TorchRec's pooled tables have its kernels in Triton, which
TorchRec 1.9 has in public and for GPUs alone; what it refuses is told in the place of a ratio.

    python -m tessera.training.bench.versus_torchrec [--ranks 2] [--device cpu|cuda] [--rounds 9]
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tessera.training.bench.harness import arguments, in_turns, machine, medians
from tessera.training.bench.ranks import in_ranks
from tessera.training.bench.sharded_steps import (
    FIRST_WEIGHT,
    LEARNING_RATE,
    Library,
    Outputs,
    Setting,
    Step,
    device_of,
    draw,
    libraries,
    stepper,
)

# Steps whose updates the compared outputs have seen.
UPDATES = 2
KINDS = (
    *("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise"),
    *("grid_shard", "data_parallel"),
)


def most_repeats(setting: Setting) -> int:
    """How often a batch, of all ranks together, has its most frequent id of one table."""
    tables = torch.arange(setting.tables)
    most = 0
    for seed in range(setting.batches):
        counts = torch.zeros(setting.tables * setting.rows, dtype=torch.int64)
        for rank in range(setting.ranks):
            lengths, ids = draw(setting, seed, rank)
            of = tables.repeat_interleave(lengths.view(setting.tables, -1).sum(1))
            counts += torch.bincount(of * setting.rows + ids, minlength=counts.numel())
        most = max(most, int(counts.max()))
    return most


def rounding_bound(setting: Setting, *, pooled: bool) -> float:
    """How far the outputs of two libraries can be apart if both compute in float32.

    With ``u = 2 ** -24``, adding ``n`` numbers in any order errs by at most ``(n - 1) * u`` times
    the sum of their magnitudes (N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd
    ed., section 4.2); terms in ``u ** 2`` are left out.  The gradients are given and none is
    negative, so a row's, which is added up from ``n`` ids, errs by ``n * u`` of itself.  Row-wise
    Adagrad divides it by the root of a sum of means of its ``D`` squares, which errs by
    ``(n + D / 2 + 3) * u``; 5 roundings more bring the update to the weight.  The quotient is at
    most ``sqrt(D)``; replicas' SGD has no quotient, and a gradient of at most ``n / B``.
    """
    unit = 2.0**-24
    repeats, terms = most_repeats(setting), setting.ids if pooled else 1
    update = LEARNING_RATE * max(math.sqrt(setting.dim), repeats / setting.batch)
    weight = FIRST_WEIGHT + UPDATES * update
    weight_error = UPDATES * unit * ((2 * repeats + setting.dim / 2 + 8) * update + weight)
    output_error = terms * (weight_error + (terms - 1) * unit * weight)
    return 2 * output_error


def seconds(step: Step, setting: Setting) -> float:
    """Seconds that one step takes on the slowest rank, the mean of a round's steps."""
    dist.barrier()
    begin = time.perf_counter()
    for index in range(setting.steps):
        step(index)
    if setting.device == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor([(time.perf_counter() - begin) / setting.steps], device=device_of(setting))
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def compare(outputs: dict[str, Outputs], bound: float) -> None:
    """Refuse to time what does not compute the same: numbers at most ``bound`` apart."""
    first, *others = (output() for output in outputs.values())
    for other in others:
        for name, expected in first.items():
            torch.testing.assert_close(other[name], expected, rtol=0.0, atol=bound)


def begun(
    library: Library, setting: Setting, kind: str, *, pooled: bool
) -> tuple[Step | None, str | None]:
    """A library's step after its first one, or why it has none; a peer may refuse."""
    try:
        step = stepper(library, setting, kind, pooled=pooled)
        step(0)
    except Exception as error:
        if library.name == "tessera":
            raise
        return None, f"{type(error).__name__}: {error}"
    return step, None


def measure(setting: Setting, kind: str, *, pooled: bool) -> dict[str, Any]:
    """Seconds a step by library; an error in place of a library that refuses this way."""
    steps: dict[str, Step] = {}
    errors: dict[str, str] = {}
    for library in libraries(setting.torchrec_kernel):
        step, error = begun(library, setting, kind, pooled=pooled)
        if step is None:
            errors[library.name] = error or ""
        else:
            steps[library.name] = step
    for index in range(1, UPDATES + 1):
        last = {name: step(index) for name, step in steps.items()}
    compare(last, rounding_bound(setting, pooled=pooled))
    rounds = {name: partial(seconds, step, setting) for name, step in steps.items()}
    times = in_turns(rounds, setting.rounds)
    result: dict[str, Any] = {**medians(times)}
    if "torchrec" in times:
        pairs = zip(times["torchrec"], times["tessera"], strict=True)
        result["ratio"] = statistics.median(theirs / ours for theirs, ours in pairs)
    return {"kind": kind, "pooled": pooled, "errors": errors, **result}


def work(setting: Setting, cases: list[tuple[str, bool]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    results = []
    for kind, pooled in cases:
        results.append(measure(setting, kind, pooled=pooled))
        if dist.get_rank() == 0:
            print(line(results[-1]), flush=True)
    return results


def line(result: dict[str, Any]) -> str:
    name = f"{result['kind']}, {'pooled' if result['pooled'] else 'unpooled'}"
    ours = f"{1 / result['tessera']:8.1f}"
    theirs = f"{1 / result['torchrec']:8.1f}" if "torchrec" in result else "       -"
    ratio = f"{result['ratio']:5.2f}" if "ratio" in result else "    -"
    error = "; ".join(f"{peer}: {text[:60]}" for peer, text in result["errors"].items())
    return f"{name:<30} {ours} {theirs}  {ratio}  {error}".rstrip()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument("--tables", type=int, default=26, help="tables (default 26)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows a table (default 20000)")
    parser.add_argument("--dim", type=int, default=64, help="columns (default 64)")
    parser.add_argument("--batch", type=int, default=256, help="samples a rank (default 256)")
    parser.add_argument("--ids", type=int, default=10, help="most ids a bag (default 10)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds (default 9)")
    parser.add_argument("--steps", type=int, default=5, help="steps a round (default 5)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which")
    parser.add_argument(
        "--what", choices=("pooled", "unpooled", "both"), default="both", help="default both"
    )
    parser.add_argument(
        "--torchrec-kernel",
        choices=("fused", "fused_triton"),
        default="fused",
        help="of TorchRec's tables; fused_triton takes TorchRec 1.9 and GPUs (default fused)",
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    args = parser.parse_args()
    fields = ("ranks", "device", "tables", "rows", "dim", "batch", "ids", "rounds", "steps")
    setting = Setting(
        torchrec_kernel=args.torchrec_kernel, **{name: getattr(args, name) for name in fields}
    )
    pooled_or_not = {"pooled": [True], "unpooled": [False], "both": [True, False]}[args.what]
    cases = [(kind, pooled) for pooled in pooled_or_not for kind in args.kinds]
    peer = "torchrec" if importlib.util.find_spec("torchrec") else "torchrec (not installed)"
    print(f"{machine()}, {setting}")
    print(f"{'steps/s':<30} {'tessera':>8} {peer:>8}  ratio")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    backend = "gloo" if setting.device == "cpu" else "nccl"
    results = in_ranks(work, setting.ranks, backend, setting, cases)
    if args.out:
        args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
