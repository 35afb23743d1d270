"""The flags of every command that loads a package: what its graph may call, and for how long."""

from __future__ import annotations

import argparse
import re

from tessera.serving.commands.flags import RefusedValue
from tessera.serving.package.time_limit import DEFAULT_LOAD_TIMEOUT_S, MAX_LOAD_TIMEOUT_S

_OPERATOR = re.compile(r"\w+::\w+", re.ASCII)


def add_allow_op(parser: argparse.ArgumentParser) -> None:
    """Declare --allow-op."""
    parser.add_argument(
        "--allow-op",
        dest="allow_ops",
        action="append",
        default=[],
        type=operator_name,
        metavar="NAME",
        help="an operator that a package's graph may call beside those that every package may, such as "
        "aten::rand; may be given several times (default: none)",
    )


def add_load_timeout(parser: argparse.ArgumentParser) -> None:
    """Declare --load-timeout-s."""
    parser.add_argument(
        "--load-timeout-s",
        type=load_timeout,
        default=DEFAULT_LOAD_TIMEOUT_S,
        metavar="S",
        help="what a package's own code may take while it is loaded (opened, optimized, warmed up, golden "
        f"answers), seconds; then this process ends (default: {DEFAULT_LOAD_TIMEOUT_S:g})",
    )


def operator_name(text: str) -> str:
    """Return ``text`` where it is ``NAMESPACE::NAME``."""
    if not _OPERATOR.fullmatch(text):
        raise RefusedValue(repr(text), "give an operator's name such as aten::rand")
    return text


def load_timeout(text: str) -> float:
    """Seconds above 0, a day at most."""
    try:
        value = float(text)
    except ValueError as error:
        raise RefusedValue(repr(text), "give a number") from error
    if not 0 < value <= MAX_LOAD_TIMEOUT_S:
        raise RefusedValue(text, f"give seconds above 0 and up to {MAX_LOAD_TIMEOUT_S:g}")
    return value
