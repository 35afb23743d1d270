"""Engines of partitions by name, and the flags of commands that choose one; see `tessera.partitions`."""

from __future__ import annotations

import argparse

from tessera.errors import UserError, refuse_unknown
from tessera.partitions import Engine, LocalEngine

ENGINES = ("local", "ray")


def open_engine(
    name: str = "local", *, processes: int | None = None, ray_address: str | None = None
) -> Engine:
    """The engine of this name.

    Args:
        name: ``local``, or ``ray``, which needs the package ray.
        processes: how many partitions are worked on at once; None: one per core, of a cluster
            that runs already all that it has.
        ray_address: where a Ray cluster runs, such as ``10.0.0.1:6379``; None: one is begun on this
            machine and ended with the work.

    Raises:
        UserError: there is no such engine, an address is given to the local one, or ray is not
            installed.
    """
    refuse_unknown("engine", name, ENGINES)
    if name == "ray":
        # Only who asks for a cluster needs the library.
        from tessera.partitions_on_ray import RayEngine  # noqa: PLC0415

        return RayEngine(ray_address, processes=processes)
    if ray_address is not None:
        raise UserError(
            f"ray_address={ray_address!r}: the local engine has none; leave it out, or take the engine ray"
        )
    return LocalEngine(processes=processes)


def add_engine_flags(parser: argparse.ArgumentParser, parts_of: str) -> None:
    """Declare --processes, --engine and --ray-address, the arguments of `open_engine`.

    ``parts_of`` says in the help what is worked on in parts.
    """
    parser.add_argument(
        "--processes",
        type=_positive,
        metavar="N",
        help=f"parts of the {parts_of} that are worked on at once (default: one per core)",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default="local",
        help=f"where parts of the {parts_of} are worked on: in processes of this machine, or on a Ray"
        " cluster (default: %(default)s)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="the cluster's address, for --engine ray (default: one is begun on this machine)",
    )


def _positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)
