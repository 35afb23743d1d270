"""Values that a request gives as strings, and the ids that the server makes of them.

A string of a feature with strings is hashed; one of another feature is a whole number, in hexadecimal
digits where the feature says so, else in decimal ones.  Legend: ``F`` features of a group, ``N`` values.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tessera.kernels.string_ids import string_ids
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.server.errors import InvalidRequestError
from tessera.serving.server.request.decoded_request import I32

MAX_STRING_BYTES = 65_536

STRING_HEAD_BYTES = 4
"""What precedes each string of a raw tensor of BYTES: how many bytes it has."""

_HEX = re.compile(rb"[0-9a-fA-F]{1,8}")
_DECIMAL = re.compile(rb"-?[0-9]+")
_INT64 = np.iinfo(np.int64)
_HEAD = struct.Struct("<I")


def split_raw(raw: bytes, count: int) -> list[bytes] | None:
    """The strings of a raw tensor of BYTES; None where they are not ``count``."""
    strings: list[bytes] = []
    at, end = 0, len(raw)
    while at < end and len(strings) < count:
        if at + STRING_HEAD_BYTES > end:
            return None
        begin = at + STRING_HEAD_BYTES
        at = begin + _HEAD.unpack_from(raw, at)[0]
        strings.append(raw[begin:at])
    return strings if at == end and len(strings) == count else None


def make_ids(
    field: str, strings: Sequence[bytes], lengths: I32, features: Sequence[FeatureSpec]
) -> NDArray[np.int64]:
    """The ids of a group whose sizes have been checked, at least one.

    Args:
        field: the strings' name in messages.
        strings: ``[N]``, feature-major.
        lengths: ``[F * rows]`` int32, whose sum is ``N``.
        features: ``[F]``.

    Returns:
        ``[N]`` int64.

    Raises:
        InvalidRequestError: a string is too long, or should be a number and is not.
    """
    given = list(strings)
    ends = np.cumsum(lengths.reshape(len(features), -1).sum(axis=1, dtype=np.int64)).tolist()
    if max(map(len, given), default=0) <= MAX_STRING_BYTES:
        ids = string_ids(given)
        begin = 0
        for feature, end in zip(features, ends, strict=True):
            numbers = ids[begin:end]
            if not feature.strings and not _read_numbers(feature, given[begin:end], numbers):
                break
            begin = end
        else:
            return ids
    raise InvalidRequestError(_first_refusal(field, given, lengths, features))


def _read_numbers(feature: FeatureSpec, strings: Sequence[bytes], out: NDArray[Any]) -> bool:
    """Write each string's number; whether all of them have one."""
    for at, string in enumerate(strings):
        number = _number(feature, string)
        if number is None:
            return False
        out[at] = number
    return True


def _number(feature: FeatureSpec, string: bytes) -> int | None:
    if feature.hex:
        return int(string, 16) if _HEX.fullmatch(string) else None
    # After zeros at its beginning, a number of 64 bits has at most 19 digits.
    if not _DECIMAL.fullmatch(string):
        return None
    digits = string.lstrip(b"-").lstrip(b"0") or b"0"
    if len(digits) > 19:
        return None
    number = -int(digits) if string.startswith(b"-") else int(digits)
    return number if _INT64.min <= number <= _INT64.max else None


def _first_refusal(
    field: str, strings: Sequence[bytes], lengths: I32, features: Sequence[FeatureSpec]
) -> str:
    """What is wrong with the first string that is refused."""
    rows = lengths.size // len(features)
    bags = np.repeat(np.arange(lengths.size), lengths).tolist()
    for string, bag in zip(strings, bags, strict=True):
        feature = features[bag // rows]
        where = f"{field}: feature '{feature.name}', row {bag % rows}"
        if len(string) > MAX_STRING_BYTES:
            return f"{where}: a string has {len(string)} bytes, the limit is {MAX_STRING_BYTES}"
        if not feature.strings and _number(feature, string) is None:
            if feature.hex:
                return (
                    f"{where}: a string of {len(string)} bytes is not 1 to 8 hexadecimal digits, as "
                    "the feature's ids are"
                )
            return (
                f"{where}: a string of {len(string)} bytes is not a whole number of 64 bits in "
                "decimal digits, and the feature's ids are numbers"
            )
    raise AssertionError("a string was refused")
