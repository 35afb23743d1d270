"""Publish a checkpoint as the next commit of a version that is served.

RUN_OR_CHECKPOINT is packaged as the version's own package was ('package-model' with the same types, device and
backend), and what differs from the version's present state, rows of tables and dense weights, is written as
DIR/NAME/VERSION/log/NNNNNNNN.commit. Servers with --follow take it within a second, without loading anything.
Where nothing differs nothing is written. A log that is broken (a file is missing or damaged) is mended: what
lies behind the last good commit is fenced off.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tessera.serving.commands.flags import add_measuring, positive
from tessera.serving.inspect.summary import human_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument(
        "run_or_checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        type=Path,
        help="run folder (its best checkpoint is taken) or checkpoint that 'tessera train' wrote",
    )
    add_version(parser)
    parser.add_argument(
        "--sign",
        dest="sign_key",
        metavar="KEY.pem",
        type=Path,
        help="sign the commit with this private Ed25519 key, as 'tessera keygen' writes it "
        "(default: not signed)",
    )
    parser.add_argument(
        "--newest-example-s",
        type=float,
        metavar="SECONDS",
        help="when the newest training example was made, in seconds since 1970, for the servers' "
        "tessera_freshness_seconds (default: not known)",
    )
    add_measuring(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON instead of sentences"
    )


def add_version(parser: argparse.ArgumentParser) -> None:
    """Declare which version of a repository a command is about."""
    parser.add_argument(
        "--repository", metavar="DIR", type=Path, required=True, help="the repository of models"
    )
    parser.add_argument(
        "--model", metavar="NAME", required=True, help="the model's folder in the repository"
    )
    parser.add_argument(
        "--base",
        type=positive,
        metavar="N",
        help="the version whose log it is (default: the model's highest)",
    )


def run(args: argparse.Namespace) -> int:
    """Publish and say what was."""
    from tessera.serving.commits.writer import Facts  # noqa: PLC0415 - loads torch
    from tessera.serving.package.signing import read_private_key  # noqa: PLC0415 - likewise
    from tessera.serving.packaging.commits.publish import (  # noqa: PLC0415 - likewise
        Publisher,
        json_of,
        version_folder,
    )

    folder = version_folder(args.repository, args.model, args.base)
    key = None if args.sign_key is None else read_private_key(args.sign_key)
    publisher = Publisher(folder, key)
    try:
        published = publisher.publish_checkpoint(
            args.run_or_checkpoint,
            Facts(newest_example_s=args.newest_example_s),
            evaluate_rows=args.evaluate_rows,
            skip_evaluation=args.no_evaluate,
        )
    finally:
        publisher.close()
    state = f"{folder.name}.{published.number}"
    if args.json:
        print(json_of(published))
        return 0
    if published.broken is not None:
        print(f"the log was broken ({published.broken.words}); what came later is fenced off")
    if published.path is None:
        print(f"nothing has changed since {args.model} {state}; no commit was written")
    else:
        print(
            f"wrote {published.path} ({human_bytes(published.bytes)}): {args.model} {state}, "
            f"{published.rows} rows changed"
        )
    return 0
