"""Show runs side by side: what differs in their configs, their metrics, size and speed, their curves.

  tessera compare runs/first runs/second
  tessera compare runs/* --csv runs.csv --html runs.html

Runs that were evaluated on other rows or labels are said not to be comparable.  Whether a difference is
more than chance, 'tessera evaluate RUN RUN' says with paired standard errors.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.durable import replacing
from tessera.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folders of tessera train, two or more",
    )
    parser.add_argument(
        "--csv",
        type=Path,
        metavar="FILE",
        help="also write a CSV file with a line for each run (default: none)",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write a page with the curves over one another (default: none)",
    )


def run(args: argparse.Namespace) -> int:
    """Read, print and write."""
    from tessera.training.comparison.runs import read_run  # noqa: PLC0415 - loads torch
    from tessera.training.comparison.table import Comparison  # noqa: PLC0415

    if len(args.runs) < 2:
        raise UserError(f"{args.runs[0]}: name two runs or more")
    comparison = Comparison([read_run(path) for path in args.runs])
    print(comparison.text())
    for path, text in ((args.csv, comparison.csv), (args.html, comparison.html)):
        if path is not None:
            with replacing(path) as stream:
                stream.write(text().encode())
            print(f"written: {path}")
    return 0
