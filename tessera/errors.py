"""Errors that are the user's to mend."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class UserError(ValueError):
    """A flag, path, config value or input file that the user must change.

    The message names the field, the value and the remedy.  The command line prints it
    as one line and ends with exit status 2; libraries raise it (or a subclass) instead
    of a bare ``ValueError`` where the cause is outside the code.
    """


def unknown_name(field: str, value: object, known: Iterable[object]) -> UserError:
    """The error of a ``value`` that is not among the ``known`` ones; it says the nearest of them."""
    names = [str(name) for name in known]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    return UserError(f"{field} is {value!r}; give one of {', '.join(names)}{hint}")


def refuse_unknown(field: str, value: object, known: Collection[object]) -> None:
    """Raise the error of `unknown_name`, unless ``value`` is among the ``known`` ones."""
    if value not in known:
        raise unknown_name(field, value, known)
