"""Numbers of the command line, refused by argparse in words that say what to give."""

from __future__ import annotations

import argparse
import math


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
