"""Columns of text to columns of a type, with the cells that are not of it.

CSV has no types and JSON few, so the kinds of the columns say what a cell must be; whether ids are
integers or strings, and what separates the items of a list, is seen in the first rows where the
config does not say.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

Holds = Literal["number", "id", "time"]

_YEARS = ("1678", "2261")  # the whole years that 64 bits of nanoseconds around 1970 hold
_MOST_US = (2**63 - 1) // 1000
_NUMBER = r"^\s*[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[nN][aA][nN]|[iI][nN][fF]([iI][nN][iI][tT][yY])?)\s*$"
_INTEGER = r"^\s*[+-]?\d{1,18}\s*$"
_PLAIN_INTEGER = r"^-?(0|[1-9]\d{0,17})$"
SEPARATORS = ("|", ";", " ", ",")


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """What a column of a text file is read as.

    Attributes:
        name: its name in the file.
        holds: numbers, ids, or points in time.
        many: whether a cell is a list of them.
        weighted: whether a cell is a list of ids with a weight each, which only JSON can say.
        strings: whether ids are strings; None: not known yet.
        separator: what stands between the items of a list in CSV; None: not known yet.
    """

    name: str
    holds: Holds
    many: bool = False
    weighted: bool = False
    strings: bool | None = None
    separator: str | None = None

    @property
    def type(self) -> Any:
        """The Arrow type of the column once it is read."""
        of_one = {
            "number": pa.float64(),
            "id": pa.string() if self.strings else pa.int64(),
            "time": pa.timestamp("ns") if self.strings else pa.int64(),
        }[self.holds]
        if self.weighted:
            return pa.map_(of_one, pa.float32())
        return pa.list_(of_one) if self.many else of_one

    def settled(self, text: Any) -> TextColumn:
        """This column with what is not known yet seen from ``text``, an array of strings."""
        text = text.drop_null()
        separator = self.separator
        if self.many:
            separator = separator or _separator(text)
            text = pc.list_flatten(_items(text, separator))
        strings = self.strings
        if strings is None:
            whole = pc.all(pc.match_substring_regex(text, _PLAIN_INTEGER)).as_py()
            strings = whole is False
        return dataclasses.replace(self, strings=strings, separator=separator)

    def read(self, text: Any) -> tuple[Any, Any | None]:
        """An array of strings as `type`, and which rows are not of it (then null), if any are."""
        if not self.many:
            return self._read_flat(text)
        lists = _items(text, self.separator or "|")
        flat, bad = self._read_flat(pc.list_flatten(lists))
        if bad is not None:
            rows = pc.filter(pc.list_parent_indices(lists), bad)
            bad = pc.is_in(pa.array(range(len(text)), rows.type), value_set=rows)
        offsets = lists.offsets
        missing = pc.is_null(text) if text.null_count else None
        return pa.ListArray.from_arrays(offsets, flat, mask=missing), bad

    def _read_flat(self, text: Any) -> tuple[Any, Any | None]:
        kind = self.type.value_type if self.many else self.type
        if pa.types.is_string(kind):
            return text, None
        if pa.types.is_timestamp(kind):
            text = pc.replace_substring_regex(text, r"Z\s*$", "")  # there is one clock
            if not _nanoseconds_reach(text):
                return _each_time(text, kind)
        try:
            return text.cast(kind), None
        except pa.ArrowInvalid:
            pass
        if pa.types.is_timestamp(kind):
            return _each_time(text, kind)
        if pa.types.is_floating(kind):
            lower = pc.utf8_lower(text)
            for word, number in (("true", "1"), ("false", "0")):
                text = pc.if_else(pc.equal(lower, word), number, text)
        pattern = _NUMBER if pa.types.is_floating(kind) else _INTEGER
        good = pc.match_substring_regex(text, pattern)
        bad = pc.fill_null(pc.invert(good), fill_value=False)
        kept = pc.if_else(bad, pa.scalar(None, text.type), text)
        return pc.utf8_trim_whitespace(kept).cast(kind), bad


def _nanoseconds_reach(text: Any) -> bool:
    """Whether 64 bits of nanoseconds hold all the moments: their years are of `_YEARS`.

    Arrow's cast of a text outside of them is an error or, before its release 23, another moment.
    """
    years = pc.min_max(pc.utf8_slice_codeunits(text, 0, 4))
    first, last = years["min"].as_py(), years["max"].as_py()
    return first is None or (_YEARS[0] <= first and last <= _YEARS[1])


def _each_time(text: Any, kind: Any) -> tuple[Any, Any]:
    values, bad = [], []
    for cell in text:
        try:
            values.append(_nanoseconds(cell, kind))
            bad.append(False)
        except pa.ArrowInvalid:  # noqa: PERF203 - only where a cell is wrong
            values.append(None)
            bad.append(True)
    return pa.array(values, pa.int64()).cast(kind), pa.array(bad)


def _nanoseconds(cell: Any, kind: Any) -> int | None:
    """The moment that one text names; one beyond what nanoseconds reach is the first or the last of them."""
    try:
        microseconds = cell.cast(pa.timestamp("us")).value
    except pa.ArrowInvalid:  # it has digits of nanoseconds, or is not a moment
        found: int | None = cell.cast(kind).value
        return found
    if microseconds is None:
        return None
    return 1000 * min(max(int(microseconds), -_MOST_US), _MOST_US)


def _separator(text: Any) -> str:
    """What separates items, by the first of the usual signs that stands in a cell."""
    if pc.any(pc.starts_with(text, "[")).as_py():
        return ","
    return next((s for s in SEPARATORS if pc.any(pc.match_substring(text, s)).as_py()), "|")


def _items(text: Any, separator: str) -> Any:
    """Lists of the items of each cell, without brackets, quotes and spaces around them."""
    inner = pc.replace_substring_regex(text, r"^\s*\[\s*|\s*\]\s*$", "")
    empty = pc.equal(inner, "")
    lists = pc.split_pattern(inner, separator)
    if pc.any(empty).as_py():
        lists = pc.if_else(empty, pa.scalar([], lists.type), lists)
    lists = pa.concat_arrays([lists])  # begins at its offset 0
    flat = pc.utf8_trim(pc.list_flatten(lists), " '\"")
    lengths = pc.fill_null(pc.list_value_length(lists), 0).cast(pa.int32())
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths)])
    return pa.ListArray.from_arrays(offsets, flat)
