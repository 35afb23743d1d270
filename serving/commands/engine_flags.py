"""The flags of commands that work on partitions of data: where, and on how many at once."""

from __future__ import annotations

import argparse

from tessera.partitions import ENGINES
from tessera.serving.commands.flags import positive


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Declare --processes, --engine and --ray-address."""
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="parts of the data that are worked on at once (default: one per core)",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help="where: processes of this machine, or a Ray cluster (default: %(default)s)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="the cluster's address, for --engine ray (default: one is begun on this machine)",
    )
