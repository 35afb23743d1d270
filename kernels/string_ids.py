"""Ids of strings: XXH64 with seed 0 of their UTF-8 bytes, read as a signed 64-bit integer.

The hash is published (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) and has
implementations in most languages, so a client of any kind can send ids or strings.  Nothing here
loads torch; ``torch.ops.tessera.xxh64`` is the same function of many strings at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash
from numpy.typing import NDArray

from tessera.errors import UserError

STRING_HASH = "xxh64"
"""What the manifest of a package calls this hash."""

EXAMPLES: dict[str, int] = {
    "": -1205034819632174695,
    "a": -3292477735350538661,
    "DE": -2325406367082704377,
    "Zürich": -8795003695103573383,
    "東京": -7688540905579211692,
    "a sentence of more than thirty-two bytes": 6961984047425228173,
}
"""Strings and their ids, by which an implementation in another language can be checked."""


def string_ids(strings: Iterable[str | bytes]) -> NDArray[np.int64]:
    """The id of each string.

    Args:
        strings: texts, or their UTF-8 bytes.

    Returns:
        ``[number of strings]`` int64.

    Raises:
        UserError: an item is neither a text nor bytes, or is a text that UTF-8 cannot express.
    """
    given = strings if isinstance(strings, list) else list(strings)
    try:
        return np.fromiter(map(_digest, given), np.uint64, len(given)).view(np.int64)
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise UserError(f"a string cannot be made an id: {error}") from error


def _digest(string: str | bytes) -> int:
    content = string if isinstance(string, bytes) else string.encode()
    return xxhash.xxh64_intdigest(content)
