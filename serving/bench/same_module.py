"""Time one model packaged by two ways, several loads of each file, at B = 1, 8, 64 and 512.

`tessera.serving.bench.forward` loads each package once.  Where a load's tables and weights come to lie in
memory moves its times by several percent, for better or worse, as long as the process lives; so this script
asks whether two files are as fast as each other by loading both several times, in the order A B B A, and
prints beside the ratio of their medians how far single loads of the first file are apart, which is what the
ratio of two single loads says at most.

The files: the benchmark's DLRM packaged as a run is, and as a module of a user's own is.  Their graphs and
their answers' bits are compared first.

    python -m tessera.serving.bench.same_module [--loads 6] [--rows 100000] [--clock cpu]
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch

from tessera.serving.bench.forward import (
    BATCH_SIZES,
    BATCHES,
    OwnModule,
    check_same,
    dlrm,
    forwards,
    random_batch,
)
from tessera.serving.package.loading import load_package
from tessera.serving.packaging.options import PackageOptions
from tessera.serving.packaging.package import package_model, write_model
from tessera.serving.packaging.ranking import ranking_source
from tessera.training.bench.harness import (
    CLOCKS,
    arguments,
    machine,
    microseconds,
    print_head,
    print_row,
)

ROUNDS = 15


def write_both(rows: int, folder: Path) -> tuple[Path, Path]:
    """The same weights as a run's package and as a factory module's."""
    model = dlrm(rows, "murmur3")
    run, own = folder / "run.pt", folder / "own.pt"
    write_model(model, run, PackageOptions(name="dlrm"))
    _, inputs, sample = ranking_source(model)
    package_model(OwnModule(model), inputs, sample, out=own, name="dlrm")
    return run, own


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--loads", type=int, default=6, help="loads of each file (default 6)")
    parser.add_argument("--rows", type=int, default=100_000, help="rows per table (default 100000)")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds per load and batch size (default 1)"
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="wall time, or the thread's CPU time, for a machine that others use (default wall)",
    )
    args = parser.parse_args()
    if args.loads < 2:
        parser.error(f"--loads is {args.loads}, at least 2 are needed")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = write_both(args.rows, Path(folder))
        generator = torch.Generator().manual_seed(1)
        check_same(paths, [random_batch(B, args.rows, generator) for B in BATCH_SIZES])
        runners = {
            (which, load): load_package(paths[which]).runner
            for load in range(args.loads)
            for which in ((0, 1) if load % 2 == 0 else (1, 0))
        }
    print(
        f"{machine()}, 1 thread, int8, {args.rows} rows a table, {args.loads} loads of each file;"
    )
    print(f"median of loads, each the median of {ROUNDS} rounds, microseconds of {args.clock} time")
    print_head(
        "B", "run", "own module", "own module / run", "loads of run's file, lowest to highest"
    )
    for batch_size in BATCH_SIZES:
        generator = torch.Generator().manual_seed(batch_size)
        batches = [random_batch(batch_size, args.rows, generator) for _ in range(BATCHES)]
        found = microseconds(
            {
                f"{which} {load}": forwards(runner, batches)
                for (which, load), runner in runners.items()
            },
            rounds=ROUNDS,
            seconds=args.seconds,
            clock=CLOCKS[args.clock],
        )
        run, own = ([found[f"{which} {load}"] for load in range(args.loads)] for which in (0, 1))
        middle, other = statistics.median(run), statistics.median(own)
        spread = f"{min(run) / middle:.2f} to {max(run) / middle:.2f}"
        print_row(batch_size, f"{middle:.1f}", f"{other:.1f}", f"{other / middle:.3f}", spread)


if __name__ == "__main__":
    main()
