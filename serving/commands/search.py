"""Find each user's best items: those whose vectors have the largest product with the user's.

The items' vectors are what 'tessera export-embeddings' wrote; the users' come from a package of the
user's tower, row by row of --data. The index is FAISS's (pip install 'tessera-rec[search]'). With an
approximate index it is printed which share of the exact answer it found, for up to 1,000 users.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.serving.commands.flags import add_batch_size, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "--embeddings",
        metavar="ITEMS.parquet",
        type=Path,
        required=True,
        help="the items' ids and vectors, as tessera export-embeddings writes them",
    )
    parser.add_argument(
        "--package",
        metavar="USER_TOWER.pt",
        type=Path,
        required=True,
        help="the package of the user's tower, or a run folder, whose user's tower is taken",
    )
    parser.add_argument(
        "--data",
        metavar="USERS.parquet",
        required=True,
        help="a row of raw values for each answer: a file, a pattern, a folder or a URL, read as tessera "
        "score reads them",
    )
    parser.add_argument(
        "--out",
        metavar="OUT.parquet",
        type=Path,
        required=True,
        help="the file to write or replace",
    )
    parser.add_argument(
        "--k", type=positive, default=10, metavar="ITEMS", help="items of a row (default 10)"
    )
    parser.add_argument(
        "--index",
        choices=["flat", "hnsw", "ivf"],
        default="flat",
        help="flat compares all items and is exact (the default); hnsw walks a graph and ivf looks into "
        "the nearest cells, which is approximate and faster from about 100,000 items on",
    )
    parser.add_argument(
        "--effort",
        type=positive,
        default=64,
        metavar="N",
        help="candidates that hnsw keeps, or cells that ivf looks into: more find more and take longer "
        "(default 64)",
    )
    parser.add_argument(
        "--exclude",
        metavar="COLUMN",
        help="a column of --data with ids of items that its row is not given, one or a list, such as the "
        "history (default: none)",
    )
    add_batch_size(parser)


def run(args: argparse.Namespace) -> int:
    """Search, write the answers and say how many there are."""
    from tessera.serving.offline import search, vectors  # noqa: PLC0415 - loads torch
    from tessera.serving.packaging.package import checked_out  # noqa: PLC0415 - likewise

    out = checked_out(args.out)
    search.faiss()
    found = search.search(
        search.read_embeddings(args.embeddings),
        vectors.open_vector_model(args.package, tower="user"),
        args.data,
        out,
        k=args.k,
        kind=args.index,
        effort=args.effort,
        exclude=args.exclude,
        batch_size=args.batch_size,
        progress=True,
    )
    if args.index != "flat":
        print(
            f"{args.index} finds {found.recall:.2%} of the {args.k} best items of the exact search"
        )
    print(f"wrote the best items of {found.users} rows to {args.out}")
    return 0
