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


class FieldError(UserError):
    """A field's value that has to be changed.

    Attributes:
        field: what code calls the field; a command may know where its value stands.
        value: as the message shows it.
        remedy: what to do about it.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field} is {value}; {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


def edits(a: str, b: str) -> int:
    """How many insertions, deletions, replacements and swaps of neighbouring characters make ``b`` of ``a``.

    Levenshtein's distance with swaps, in which no character is changed twice (optimal string alignment).
    """
    before, row = list[int](), list(range(len(b) + 1))
    for i, letter in enumerate(a):
        older, before, row = before, row, [i + 1]
        for j, other in enumerate(b):
            fewest = min(before[j] + (letter != other), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == b[j - 1] and other == a[i - 1]:
                fewest = min(fewest, older[j - 1] + 1)
            row.append(fewest)
    return row[-1]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the ``known`` name with the fewest edits to ``name``, or "" where they are over a third of its characters.

    cpp_server/src/common/nearest.cc has the same rule.
    """
    found, fewest = "", 0
    for candidate in known:
        longer = max(len(name), len(candidate))
        if longer > 2 * len(candidate) + 1:
            continue  # nothing like it, however long it is
        distance = edits(name, candidate)
        if 3 * distance <= longer and (not found or distance < fewest):
            found, fewest = candidate, distance
    return found


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
