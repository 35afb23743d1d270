"""Checks of a config's fields.  Messages begin ``name=value:``, which `typed_config` finds the place of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

from tessera.errors import UserError


def allowed(section: object, names: str, may_be: Callable[[Any], bool], remedy: str) -> None:
    """Refuse a value that is not allowed, of a tuple each item; None always is.

    Args:
        section: a dataclass.
        names: the names of its fields that are checked, with spaces between them.
        may_be: whether a value is allowed.
        remedy: what to do instead.

    Raises:
        UserError: naming field, value and remedy.
    """
    for name in names.split():
        value = getattr(section, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and not may_be(item):
                raise UserError(f"{name}={item!r}: {remedy}")


def positive(section: object, names: str) -> None:
    """Refuse fields that are not above 0; see `allowed`."""
    allowed(section, names, lambda value: 0 < value < math.inf, "give a number above 0")


def not_negative(section: object, names: str) -> None:
    """Refuse fields below 0; see `allowed`."""
    allowed(section, names, lambda value: 0 <= value < math.inf, "give 0 or a number above it")


def at_least_one(section: object, names: str) -> None:
    """Refuse fields below 1; see `allowed`."""
    allowed(section, names, lambda value: value >= 1, "give at least 1")


def one_of(section: object, names: str, choices: Any) -> None:
    """Refuse fields that are not among the words of the ``Literal`` ``choices``; see `allowed`."""
    words = get_args(choices)
    allowed(section, names, lambda value: value in words, f"give one of {', '.join(words)}")


def share(section: object, names: str) -> None:
    """Refuse fields that are not in [0, 1); see `allowed`."""
    allowed(section, names, lambda value: 0 <= value < 1, "give a share from 0 to below 1")
