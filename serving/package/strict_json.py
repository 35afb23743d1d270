"""JSON as every reader of it understands it: no key twice, no number that does not fit, no other words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_MAX_DIGITS = 20  # of a 64-bit number, with its sign


def read_strictly(content: bytes) -> Any:
    """The value that ``content`` writes down.

    Raises:
        ValueError: it is not JSON, has a key twice, or a number that does not fit into 64 bits or a float.
        RecursionError: it is too deep.
    """
    return json.loads(
        content,
        object_pairs_hook=_no_key_twice,
        parse_int=_integer,
        parse_float=_number,
        parse_constant=_refused_word,
    )


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers of JSON differ in which of two values they take.
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key is there twice: {first_twice(key for key, _ in pairs)!r}")
    return found


def first_twice(names: Iterable[str]) -> str:
    """The first of ``names`` that was there before; one must be."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("every name is there once")


def _integer(text: str) -> int | float:
    # What does not fit into 64 bits is a float for other readers of JSON, too.
    value = int(text) if len(text) <= _MAX_DIGITS else 1 << 64
    return value if -(1 << 63) <= value < 1 << 64 else _number(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is larger than a float may be")
    return value


def _refused_word(word: str) -> None:
    raise ValueError(f"{word} is not a word of JSON")
