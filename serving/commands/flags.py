"""What the commands' flags have in common; argparse refuses numbers in words that say what to give."""

from __future__ import annotations

import argparse
import math
from dataclasses import fields
from pathlib import Path
from typing import Any


class RefusedValue(argparse.ArgumentTypeError):
    """What was given for a flag cannot be read; ``shown`` is how a line shows it."""

    def __init__(self, shown: str, remedy: str) -> None:
        super().__init__(f"{shown}: {remedy}")
        self.shown = shown
        self.remedy = remedy


def add_package(parser: argparse.ArgumentParser) -> None:
    """Declare the package that a command is about."""
    parser.add_argument(
        "model", metavar="MODEL.pt", type=Path, help="the file that package-model wrote"
    )


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Declare on how many validation rows a package is compared with the model that it was made of."""
    measuring = parser.add_mutually_exclusive_group()
    measuring.add_argument(
        "--evaluate-rows",
        type=positive,
        metavar="N",
        help="compare on about the first N validation rows (default: on all)",
    )
    measuring.add_argument(
        "--no-evaluate",
        action="store_true",
        help="do not compare on the validation set; its data is then not needed",
    )


def fields_of(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The flags' values for the fields of a dataclass that they are named after."""
    return {f.name: getattr(args, f.name) for f in fields(kind) if hasattr(args, f.name)}


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, least=1)


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, least=0)


def distance(text: str) -> float:
    """A number that is neither negative nor NaN nor infinite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a distance; give 0 or a number above it")
    return value


def _whole(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least {least}")
    return value


def add_batch_size(parser: argparse.ArgumentParser) -> None:
    """Declare --batch-size of the commands that compute vectors of whole files."""
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=4096,
        metavar="ROWS",
        help="rows that are computed at a time (default 4096)",
    )
