"""Say how good packages and runs are on rows with labels: metrics, slices, importance, and how sure that is.

PACKAGE_OR_RUN is a file that package-model wrote, a run folder of 'tessera train' (its best checkpoint is
taken) or one of its checkpoints. A run without --data is evaluated on its own test split; a package
needs --data, whose columns are those that the model was trained on, and --label where it has one score.
Several models answer the same rows, and their differences to the first are paired by row.

  tessera evaluate runs/first --by country --out evaluation
  tessera evaluate model.pt --data new.parquet --label click --cluster user_id
  tessera evaluate runs/first model.pt --config runs/first --importance 5

Standard errors take rows of one cluster (--cluster) for one observation, as those of a user. --out writes
evaluation.json, slices.csv and report.html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands.flags import not_negative, positive
from tessera.serving.commands.loading_flags import add_allow_op, add_load_timeout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "models",
        metavar="PACKAGE_OR_RUN",
        nargs="+",
        type=Path,
        help="packages, run folders or checkpoints; the first is what others are compared with",
    )
    _add_data(parser)
    _add_looks(parser)
    parser.add_argument(
        "--importance",
        nargs="?",
        type=positive,
        const=3,
        metavar="REPEATS",
        help="shuffle each column so often, and say what the models lose by it (default: not done; 3"
        " without a number)",
    )
    parser.add_argument(
        "--importance-rows",
        type=positive,
        default=20_000,
        metavar="N",
        help="rows that are used for it, evenly spread; they are held in memory (default 20000)",
    )
    parser.add_argument("--seed", type=not_negative, default=0, help="of the shuffles (default 0)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="folder for evaluation.json, slices.csv and report.html (default: only print)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print evaluation.json instead of tables"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress (default: bars on a terminal)"
    )
    add_allow_op(parser)
    add_load_timeout(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        metavar="PATH",
        action="append",
        default=[],
        help="rows to evaluate on: a file, folder or pattern as data.path of a config has it; may be given"
        " several times (default: the run's own data)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "valid", "test", "all"),
        help="which rows (default: all of --data, and otherwise test)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE_OR_RUN",
        help="read the data as the data section of this config says, or of this run folder's (default: as"
        " the first run's)",
    )
    parser.add_argument(
        "--format",
        choices=("table", "criteo", "movielens"),
        help="the format of --data for a package (default: as its features and the path look)",
    )
    parser.add_argument(
        "--label",
        dest="labels",
        metavar="[OUTPUT=]COLUMN",
        action="append",
        default=[],
        help="the label's column, and of which output; may be given several times (default: the run's"
        " labels, or the columns that have the outputs' names)",
    )
    parser.add_argument(
        "--task",
        choices=("binary", "regression"),
        help="what the labels are (default: as the run says; of packages alone binary where all are 0 or 1)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder for prepared files (default: the config's, or beside the data)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=2048,
        metavar="ROWS",
        help="rows of one forward pass (default 2048)",
    )
    parser.add_argument(
        "--max-rows",
        type=not_negative,
        default=10_000_000,
        metavar="N",
        help="of more rows, batches evenly spread over them are scored; 0: all. It bounds the memory, at"
        " about 200 bytes a row and 70 for each further model (default 10000000)",
    )


def _add_looks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--by",
        metavar="COLUMN",
        action="append",
        default=[],
        help="metrics by the values of this column, also; may be given several times (default: none)",
    )
    parser.add_argument(
        "--buckets",
        type=positive,
        default=5,
        metavar="N",
        help="into how many buckets of as many rows a numeric --by column is cut (default 5)",
    )
    parser.add_argument(
        "--top",
        type=positive,
        default=10,
        metavar="N",
        help="how many values of any other --by column are shown, the most frequent ones (default 10)",
    )
    parser.add_argument(
        "--group",
        metavar="COLUMN",
        help="rows that are ranked together, for GAUC, recall@k and NDCG@k (default: the column of kind"
        " group, or one that is called as users are)",
    )
    parser.add_argument(
        "--k",
        type=positive,
        action="append",
        metavar="K",
        help="of recall@k and NDCG@k; may be given several times (default 10)",
    )
    parser.add_argument(
        "--cluster",
        metavar="COLUMN",
        help="rows that are one observation for standard errors; 'rows': each is its own (default: the"
        " user's column if one is known, else --group, else rows)",
    )
    parser.add_argument(
        "--weight", metavar="COLUMN", help="what a row counts (default: all the same)"
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate, print and write."""
    # --help must not wait for torch.
    from tessera.serving.offline.evaluation.data import Wanted  # noqa: PLC0415
    from tessera.serving.offline.evaluation.evaluate import Options, evaluate  # noqa: PLC0415
    from tessera.serving.offline.evaluation.report import (  # noqa: PLC0415
        json_text,
        printed,
        write_files,
    )
    from tessera.serving.package.time_limit import TimeLimit  # noqa: PLC0415

    limit = TimeLimit(seconds=args.load_timeout_s, prefix="tessera evaluate: error: ", status=2)
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise UserError(f"--out {args.out}: is a file; give a folder")
    found = evaluate(
        args.models,
        Wanted(
            data=tuple(args.data),
            format=args.format,
            split=args.split,
            config=args.config,
            labels=_labels(args.labels),
            task=args.task,
            cache_dir=args.cache_dir,
        ),
        Options(
            by=tuple(dict.fromkeys(args.by)),
            group=args.group,
            cluster=args.cluster,
            weight=args.weight,
            buckets=args.buckets,
            top=args.top,
            ks=tuple(dict.fromkeys(args.k or [10])),
            batch_size=args.batch_size,
            max_rows=args.max_rows,
            importance=args.importance,
            importance_rows=args.importance_rows,
            seed=args.seed,
        ),
        allow_ops=args.allow_ops,
        time_limit=limit,
        progress=not args.quiet,
    )
    print(json_text(found) if args.json else printed(found), end="")
    if args.out is not None:
        write_files(found, args.out)
        if not args.json:
            print(f"report: {args.out / 'report.html'}")
    return 0


def _labels(given: list[str]) -> dict[str, str | None]:
    """By output, or by the label's own name, the label's column."""
    labels: dict[str, str | None] = {}
    for text in given:
        output, equals, column = text.partition("=")
        if not output or (equals and not column):
            raise UserError(f"--label {text!r}: give COLUMN or OUTPUT=COLUMN")
        labels[output] = column if equals else None
    return labels
