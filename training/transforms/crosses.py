"""Crosses: features whose id stands for the ids of several features together."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.errors import UserError

MOST_COLUMNS = 8


@dataclass(frozen=True, kw_only=True)
class Cross:
    """A feature of the model that is the first ids of several features joined into one.

    A sample in which one of them is missing has an empty bag.  Its table is hashed as any other.

    Attributes:
        of: two or more sparse features of the data.
    """

    of: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 2 <= len(self.of) <= MOST_COLUMNS or len(set(self.of)) != len(self.of):
            raise UserError(
                f"of={list(self.of)}: give 2 to {MOST_COLUMNS} different columns of ids"
            )
