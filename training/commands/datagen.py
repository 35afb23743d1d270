"""Write synthetic rows in Criteo's format, drawn from a known generating model.

Categories follow a power law, columns are missing at different rates, and the label depends on
integers, categories and pairs of categories.  Beside FILE lies FILE.truth.json with the model's
parameters and the AUC and log loss that it has itself on these rows: no other model can expect a
better one, so a trained model can be held against it.

The same --seed gives the same bytes, whatever --workers.  Files that exist are replaced.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from tessera.cpus import usable_cpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--rows", type=int, required=True, help="number of rows")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write; a name ending in .gz is compressed",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the model and of the rows (default: 0)"
    )
    parser.add_argument(
        "--positive-rate",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of rows with label 1, between 0 and 1 (default: 0.25)",
    )
    parser.add_argument(
        "--probabilities",
        action="store_true",
        help="also write each row's true probability to FILE.p.npy (float32)",
    )
    workers = min(usable_cpus(), 8)
    parser.add_argument(
        "--workers",
        type=int,
        default=workers,
        metavar="N",
        help=f"processes; 0 or 1: only this one (default: one per core, at most 8; here {workers})",
    )


def run(args: argparse.Namespace) -> int:
    """Generate, and say what was written."""
    from tessera.training.data.datagen import generate, truth_path  # noqa: PLC0415 - loads numpy

    truth = generate(
        args.out,
        rows=args.rows,
        seed=args.seed,
        positive_rate=args.positive_rate,
        workers=args.workers,
        probabilities=args.probabilities,
    )
    size = args.out.stat().st_size / 1e6
    written = f"{args.out}: {truth.rows} rows, {size:.1f} MB"
    if math.isnan(truth.auc):
        print(written)
        print(f"{truth_path(args.out)}: no AUC, which takes rows of both labels")
        return 0
    print(f"{written}, {truth.positive_rate:.1%} positive")
    print(
        f"{truth_path(args.out)}: best possible AUC {truth.auc:.4f}, log loss {truth.log_loss:.4f}"
    )
    return 0
