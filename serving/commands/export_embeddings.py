"""Write vectors of rows, or the rows of an embedding table, to a Parquet file.

RUN_OR_PACKAGE is a package of one tower ('tessera package-model RUN --tower item') or of any model
that gives a vector, or a run folder or checkpoint with model.arch=two_tower. For every row of --data the
file holds the id and the vector, a list of float32 of fixed size. With --table it holds the rows of an
embedding table of a run or package of any architecture, and the ids that they belong to where there is a
vocabulary; of a package they are the numbers that its lookups see (int8 rows with scale and bias applied).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.commands.flags import add_batch_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "source",
        metavar="RUN_OR_PACKAGE",
        type=Path,
        help="run folder, checkpoint, or a package that gives a vector",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--data",
        metavar="FILE",
        help="rows of raw values, one vector each: a file, a pattern, a folder or a URL, read as tessera score "
        "reads them; columns that the model does not take are left alone (this or --table is needed)",
    )
    what.add_argument(
        "--table",
        metavar="NAME",
        help="the rows of this embedding table, as float32 (default: vectors of --data)",
    )
    parser.add_argument(
        "--out",
        metavar="OUT.parquet",
        type=Path,
        required=True,
        help="the file to write or replace",
    )
    parser.add_argument(
        "--tower",
        choices=["user", "item"],
        help="which tower of a run (default item); a package must be of this one, if it is given",
    )
    parser.add_argument(
        "--id",
        metavar="COLUMN",
        help="the column with the ids (default: data.item_id of an item's tower, data.user_id of a user's)",
    )
    parser.add_argument(
        "--unique",
        action="store_true",
        help="write every id once, with the vector of its last row, so that a table of interactions can "
        "stand for one of items; all vectors are then held in memory (default: every row)",
    )
    add_batch_size(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and say how many vectors it has."""
    from tessera.serving.offline import embeddings, vectors  # noqa: PLC0415 - loads torch
    from tessera.serving.packaging.package import checked_out  # noqa: PLC0415 - likewise

    out = checked_out(args.out)
    if args.table is not None:
        for flag in ("tower", "id", "unique"):
            if getattr(args, flag):
                raise UserError(f"--{flag} is for --data; leave it out with --table")
        count = embeddings.export_table(args.source, args.table, out, progress=True)
    else:
        model = vectors.open_vector_model(args.source, tower=args.tower)
        count = embeddings.export_vectors(
            model,
            args.data,
            out,
            id_column=args.id,
            unique=args.unique,
            batch_size=args.batch_size,
            progress=True,
        )
    print(f"wrote {count} vectors to {args.out}")
    return 0
