r"""Look at a table and write a config that trains on it.

A sample of the rows decides what each column is: numbers, ids, lists, labels, times.  What was seen
and why it was chosen is printed and, for each column, stands in the config as a comment.

  tessera schema clicks.csv --out data.yaml
  tessera train --config data.yaml

Several files, patterns in quotes and folders are taken as `tessera train` takes them.  A label is
found by its name (click, target, purchase, ...) where its values are 0 and 1; --label says it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tessera.errors import UserError

if TYPE_CHECKING:
    from tessera.training.data.table.infer import Inferred


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "data",
        nargs="+",
        metavar="DATA",
        help="a file, a folder or a quoted pattern; .parquet, .csv, .tsv, .jsonl, .arrow, .feather",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="config to write, a YAML file"
    )
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME",
        help="a column to predict; may be given several times (default: found by name and values)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=100_000,
        metavar="N",
        help="rows to look at (default: 100000)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace FILE if it is there (default: refuse to)",
    )


def run(args: argparse.Namespace) -> int:
    """Infer, print and write."""
    # --help must not wait for pyarrow.
    from tessera.training.data.table.files import find_files  # noqa: PLC0415
    from tessera.training.data.table.infer import infer  # noqa: PLC0415
    from tessera.training.data.table.sample import read_sample  # noqa: PLC0415
    from tessera.training.data.table.suggest import suggest_config  # noqa: PLC0415

    if args.rows < 1:
        raise UserError(f"--rows {args.rows}: give at least 1")
    if args.out.exists() and not args.overwrite:
        raise UserError(f"--out {args.out}: is there already; give another name or --overwrite")
    sample = read_sample(find_files(tuple(args.data), "DATA"), args.rows)
    columns = infer(sample, args.label)
    rows = sample.table.num_rows
    text = suggest_config(args.data, columns, sample_rows=rows, total_rows=sample.total_rows)
    args.out.write_text(text, encoding="utf-8")
    print(f"{rows:,} of about {sample.total_rows:,} rows:\n")
    _print_table(columns)
    print(f"\nwritten: {args.out}; train with: tessera train --config {args.out}")
    print(
        "change keys there, or behind the command: train.epochs=3 'model.over_layers=[128, 64]'"
        " (tessera train --help-config lists them)"
    )
    return 0


_HEADER = ("column", "type", "missing", "distinct", "kind", "why", "seen", "examples")


def _print_table(columns: list[Inferred]) -> None:
    rows = [
        (
            column.name,
            column.type,
            f"{column.missing:.1%}",
            f"{column.distinct:,}",
            column.config.kind,
            column.why,
            column.seen,
            column.examples,
        )
        for column in columns
    ]
    widths = [max(len(row[place]) for row in [_HEADER, *rows]) for place in range(len(_HEADER))]
    on_terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    limit = shutil.get_terminal_size().columns if on_terminal else None
    for number, row in enumerate([_HEADER, *rows]):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        line = "  ".join(cells).rstrip()[:limit]
        print(f"\033[1m{line}\033[0m" if on_terminal and number == 0 else line)
