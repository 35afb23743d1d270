"""JSON of a request over REST: strict, and bounded in size and depth before it is read.

Both servers refuse the same texts with the same words, so the checks have an order: size, depth, grammar, keys.
Where the grammar does not hold, no place is told, for readers differ in where they notice it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from tessera.serving.server.errors import InvalidRequestError

MAX_JSON_BYTES = 4 * 1024 * 1024
"""Enough for 400,000 ids.  Reading it takes the interpreter's lock for a tenth of a second at most, in which nobody else is
answered; tensors that are larger travel as binary data."""

MAX_DEPTH = 8

_SLOW_NUMBERS = re.compile(rb"[0-9]{300}|[eE]\+?0*[0-9]{3}")
"""What a number must have that is larger than a double may be."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(content: bytes) -> Any:
    """The value that ``content`` writes down.

    Raises:
        InvalidRequestError: it is too large, too deep, not JSON, or has a key twice.
    """
    if len(content) > MAX_JSON_BYTES:
        raise InvalidRequestError(
            f"the JSON has {len(content)} bytes, the limit is {MAX_JSON_BYTES}; send large tensors as "
            "binary data"
        )
    if _is_deeper(content, MAX_DEPTH):
        raise InvalidRequestError(f"the JSON is nested more than {MAX_DEPTH} deep")
    twice = False

    def note_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal twice
        found = dict(pairs)
        twice = twice or len(found) != len(pairs)
        return found

    # Calls for each number take several times as long as the rest, so they are for texts that may need them.
    slow: dict[str, Any] = {}
    if _SLOW_NUMBERS.search(content):
        slow = {"parse_int": _whole, "parse_float": _double}
    try:
        found = json.loads(
            content.decode(), object_pairs_hook=note_twice, parse_constant=_refuse, **slow
        )
        if _SURROGATE.search(content):
            json.dumps(found, ensure_ascii=False).encode()  # halves of characters cannot be
    except ValueError:
        raise InvalidRequestError(
            f"the JSON ({len(content)} bytes) is not valid, or has a number that is larger than a "
            "double may be"
        ) from None
    if twice:
        raise InvalidRequestError("the JSON has an object with the same key twice")
    return found


def _is_deeper(content: bytes, most: int) -> bool:
    """Whether more than ``most`` brackets are open anywhere, outside of strings."""
    if content.count(b"[") + content.count(b"{") <= most:
        return False
    bare = np.frombuffer(content.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.cumsum(bare == ord('"'), dtype=np.int32) % 2 == 0
    step = np.isin(bare, np.frombuffer(b"[{", np.uint8)).astype(np.int8)
    step -= np.isin(bare, np.frombuffer(b"]}", np.uint8))
    step *= outside
    return bool(np.cumsum(step, dtype=np.int32).max(initial=0) > most)


def _whole(text: str) -> int | float:
    return int(text) if len(text) < 300 else _double(text)


def _double(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise ValueError(text)
    return value


def _refuse(word: str) -> None:
    raise ValueError(word)
