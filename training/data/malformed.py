"""Rows that cannot be read: counted and reported, or refused; never turned into numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.errors import UserError

MAX_EXAMPLES = 10
"""How many malformed rows are described; all are counted."""

_MAX_VALUE_CHARACTERS = 40


@dataclass(frozen=True, kw_only=True)
class MalformedRow:
    """One row that was left out.

    Attributes:
        file: path of the file.
        line: number of the line in the file (after decompression), from 1.
        column: name of the first column that is wrong, e.g. ``I3``; ``line`` where the number
            of columns is.
        value: what stands there, shortened; for a wrong number of columns that number.
        reason: what was expected.
    """

    file: str
    line: int
    column: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.column}={self.value!r}: {self.reason}"


class MalformedRowError(UserError):
    """A malformed row where none is tolerated; ``row`` says which."""

    def __init__(self, row: MalformedRow) -> None:
        super().__init__(
            f"{row}; mend or remove the line, or set strict=false to leave such rows out"
        )
        self.row = row


@dataclass(frozen=True)
class MalformedReport:
    """How many rows were left out, and the first of them.

    Attributes:
        total: number of rows left out.
        examples: the first `MAX_EXAMPLES` of them, in the order of files and lines.
    """

    total: int = 0
    examples: tuple[MalformedRow, ...] = ()

    def __add__(self, other: MalformedReport) -> MalformedReport:
        return MalformedReport(
            self.total + other.total, (self.examples + other.examples)[:MAX_EXAMPLES]
        )

    def __str__(self) -> str:
        if self.total == 0:
            return "no malformed rows"
        shown = len(self.examples)
        listed = "\n".join(f"  {row}" for row in self.examples)
        which = "" if shown == self.total else f" (first {shown} shown)"
        rows = "row" if self.total == 1 else "rows"
        return f"{self.total} malformed {rows} left out{which}:\n{listed}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable form; `from_json` is its inverse."""
        return {"total": self.total, "examples": [dict(vars(row)) for row in self.examples]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MalformedReport:
        """Read what `to_json` wrote."""
        return cls(data["total"], tuple(MalformedRow(**row) for row in data["examples"]))


Progress = Callable[[int, MalformedReport], None]
"""Is told the bytes of source text that were read since the last call, and what was left out so far."""


def shorten(value: bytes) -> str:
    """A field's bytes as text for a message; bytes that are not ASCII become escapes."""
    text = value[: _MAX_VALUE_CHARACTERS + 1].decode("ascii", errors="backslashreplace")
    if len(text) <= _MAX_VALUE_CHARACTERS:
        return text
    return text[:_MAX_VALUE_CHARACTERS] + "..."
