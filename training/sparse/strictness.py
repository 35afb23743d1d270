"""Whether the sparse types check their fields when they are built, or where they are used.

At first they are checked when they are built, so that an error names the line that made it.  TorchRec
checks little: there a program may build a tensor whose lengths, offsets and values do not fit each other,
and never look it up.  Such a program calls ``tessera.training.strict(False)`` once, or runs with
``TESSERA_STRICT=0`` in its environment, which processes that it starts inherit.  What does not fit is
then refused by the lookup, the cut or the exchange that uses it.
"""

from __future__ import annotations

import os

_VARIABLE = "TESSERA_STRICT"
_WORDS = {"1": True, "true": True, "0": False, "false": False}


def _from_environment() -> bool:
    word = os.environ.get(_VARIABLE, "1")
    if word.lower() not in _WORDS:
        raise ValueError(f"{_VARIABLE} is {word!r}; give one of {', '.join(_WORDS)}")
    return _WORDS[word.lower()]


class _Strictness:
    """Holds the one setting of the process."""

    on = _from_environment()


def strict(on: bool = True) -> bool:  # noqa: FBT001, FBT002 - reads as a sentence where it is called
    """Set whether sparse types check their fields when they are built; the setting is the process's.

    Args:
        on: False leaves the checks to what uses the fields.

    Returns:
        What was set before.
    """
    before, _Strictness.on = _Strictness.on, on
    return before


def is_strict() -> bool:
    """Return whether fields are checked when a sparse type is built."""
    return _Strictness.on
