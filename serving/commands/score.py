"""Score files of raw rows with a package, without a server, on all cores.

    tessera score model.pt --data clicks/*.parquet --out scores.parquet --keep row_id

Files hold rows of raw values, as the data did that the model was trained on: Parquet, CSV, TSV, JSON
lines or Arrow, by the end of their names; a file, several, a pattern, or a folder, whose sub-folders
named day=3 give a column.  Columns that the model does not take are not read.  A package that was
trained on Criteo's format also takes that (.tsv or .txt without a header, .gz too).

OUT.parquet has the input's rows in their order: the columns of --keep, then a column for each output
of the model.  A row that the model cannot take (a cell of another type, a cell too many, an id that
the model refuses) has the score null, is counted, and is told with file and row.  Scores have the bits that
a server gives, whatever the number of processes or the engine.

While it works, finished parts are kept in the folder OUT.parquet.parts.  The same command goes on
where it was ended; one with another package, other data or other flags is refused until --overwrite
is given.

With --engine ray parts are scored on a Ray cluster; its nodes need the package and the files under the
same paths.

Exit status: 0 the output is written; 2 a flag, the package or the data has to be changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.engines import add_engine_flags
from tessera.serving.commands.flags import add_package, positive
from tessera.serving.commands.loading_flags import add_allow_op, add_load_timeout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``tessera score``."""
    add_package(parser)
    parser.add_argument(
        "--data",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files of raw rows, patterns or folders; scored in this order",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="FILE", help="the Parquet file to write"
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="COLUMN[=NAME]",
        help="a column of the data that is carried into the output, under its own or another name;"
        " may be repeated (default: none)",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=2048,
        metavar="N",
        help="rows that are scored at once; scores do not depend on it (default: %(default)s)",
    )
    add_engine_flags(parser, "data")
    parser.add_argument(
        "--separator",
        metavar="SIGN",
        help="what stands between the items of lists in files of text (default: the first of | ; space"
        " and comma that the first rows have)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse the first row that cannot be scored instead of giving it none (default: off)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace FILE, and begin anew what an earlier call left unfinished (default: off)",
    )
    parser.add_argument(
        "--public-key",
        metavar="FILE",
        type=Path,
        action="append",
        help="refuse a package that is not signed with this key (PEM); may be given several times, one"
        " of the keys is enough (default: signatures are not checked)",
    )
    add_allow_op(parser)
    add_load_timeout(parser)
    parser.add_argument(
        "--quiet", action="store_true", help="show no progress and no summary (default: off)"
    )


def run(args: argparse.Namespace) -> int:
    """Score and say what was scored; returns the exit status."""
    from tessera.serving.offline.scoring import ScoreOptions, say, score_files  # noqa: PLC0415 - loads torch
    from tessera.serving.package.time_limit import TimeLimit  # noqa: PLC0415 - likewise

    load = {
        "allow_ops": args.allow_ops,
        "time_limit": TimeLimit(
            seconds=args.load_timeout_s, prefix="tessera score: error: ", status=2
        ),
    }
    if args.public_key is not None:
        from tessera.serving.package.signing import read_public_key  # noqa: PLC0415 - slow to import

        load["trusted_keys"] = [read_public_key(path) for path in args.public_key]
    options = ScoreOptions(
        keep=tuple(args.keep),
        batch_rows=args.batch,
        processes=args.processes,
        engine=args.engine,
        ray_address=args.ray_address,
        separator=args.separator,
        strict=args.strict,
        overwrite=args.overwrite,
        load=load,
    )
    scored = score_files(args.model, args.data, args.out, options, progress=not args.quiet)
    if not args.quiet:
        say(scored)
    return 0
