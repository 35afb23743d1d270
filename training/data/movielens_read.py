"""MovieLens' own files, 100K and 1M layouts, to plain tables.

100K: ``u.data`` (user, item, rating, timestamp; tabs), ``u.item`` and ``u.user`` (bars, Latin-1).
1M: ``ratings.dat``, ``movies.dat``, ``users.dat`` (``::``, Latin-1).  Source: the read-me of each.
The tables fit in memory many times over (a million ratings are 32 MB here), so they are read
line by line in Python.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tessera.errors import UserError
from tessera.training.data.malformed import MalformedReport, MalformedRow, shorten

Row = TypeVar("Row")

GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary",
    "Drama", "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi",
    "Thriller", "War", "Western",
)  # fmt: skip
"""Genre ids, in the order of the 100K layout's flags; the 1M layout names them."""

OCCUPATIONS_100K = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive",
    "healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer",
    "retired", "salesman", "scientist", "student", "technician", "writer",
)  # fmt: skip
"""Occupation ids of the 100K layout; the 1M layout numbers its own 21."""

AGE_BUCKETS = (1, 18, 25, 35, 45, 50, 56)
"""Lower bounds, as the 1M layout gives ages; its ids are the bounds' places."""

MAX_ID = 2**31 - 1
_MAX_DIGITS = 19  # of a 64-bit number


@dataclass(frozen=True)
class User:
    """``gender``: 0 F, 1 M; ``age`` and ``occupation``: ids of the tables above; ``zip_code``: as read."""

    gender: int
    age: int
    occupation: int
    zip_code: str = ""


@dataclass(frozen=True)
class Item:
    """``year`` of release, None where the title does not say; ``genres`` as ids."""

    year: int | None
    genres: tuple[int, ...]


@dataclass(frozen=True)
class MovieLens:
    """The three tables.

    Attributes:
        ratings: ``[n, 4]`` int64: user, item, rating (1 to 5), timestamp in seconds, in the
            order of the file.
        users: by user id.
        items: by item id.
        malformed: lines that were left out of any of the three.
    """

    ratings: npt.NDArray[np.int64]
    users: dict[int, User]
    items: dict[int, Item]
    malformed: MalformedReport


@dataclass(frozen=True)
class Layout:
    """File names and separators of one layout, and how its lines become users and items."""

    ratings: str
    items: str
    users: str
    ratings_separator: str
    separator: str
    user: Callable[[Sequence[str]], tuple[int, User]]
    item: Callable[[Sequence[str]], tuple[int, Item]]
    item_columns: int

    def files(self, folder: Path) -> list[Path]:
        """The files in ``folder``."""
        return [folder / name for name in (self.ratings, self.items, self.users)]


def find_layout(folder: Path) -> Layout:
    """Which layout ``folder`` holds.

    Raises:
        UserError: neither, or not all of its files.
    """
    for layout in LAYOUTS:
        if (folder / layout.ratings).is_file():
            for file in layout.files(folder):
                if not file.is_file():
                    raise UserError(
                        f"path='{folder}': it has {layout.ratings} but no {file.name}; add it"
                    )
            return layout
    names = " or ".join(layout.ratings for layout in LAYOUTS)
    raise UserError(f"path='{folder}': no {names} in it; name the folder that has one")


def read_movielens(folder: Path) -> MovieLens:
    """Read the three files of ``folder``.

    A rating of a user or item that the other files do not have is malformed.

    Raises:
        UserError: see `find_layout`.
    """
    layout = find_layout(folder)
    table = _Table(layout.separator)
    users = dict(table.read(folder / layout.users, 5, layout.user))
    items = dict(table.read(folder / layout.items, layout.item_columns, layout.item))

    def rating(fields: Sequence[str]) -> tuple[int, int, int, int]:
        user = _integer("user", fields[0], 0, MAX_ID)
        item = _integer("item", fields[1], 0, MAX_ID)
        if user not in users:
            raise _BadField("user", fields[0], f"no such user in {layout.users}")
        if item not in items:
            raise _BadField("item", fields[1], f"no such item in {layout.items}")
        stars, time = _integer("rating", fields[2], 1, 5), _integer("time", fields[3], 0, 2**62)
        return user, item, stars, time

    rated = _Table(layout.ratings_separator, table.malformed)
    ratings = list(rated.read(folder / layout.ratings, 4, rating))
    return MovieLens(np.array(ratings, np.int64).reshape(-1, 4), users, items, rated.malformed)


class _BadField(Exception):  # noqa: N818 - it never leaves this file
    """A field that cannot be read: column, text, what was expected."""


class _Table:
    """Reads files line by line; what cannot be read is added to ``malformed``."""

    def __init__(self, separator: str, malformed: MalformedReport = MalformedReport()) -> None:  # noqa: B008 - it is frozen
        self._separator = separator
        self.malformed = malformed

    def read(
        self, file: Path, columns: int, convert: Callable[[Sequence[str]], Row]
    ) -> Iterator[Row]:
        """``convert(fields)`` of every line that has ``columns`` fields and converts."""
        with file.open(encoding="latin-1", newline="\n") as lines:
            for number, line in enumerate(lines, start=1):
                fields = line.rstrip("\r\n").split(self._separator)
                try:
                    if len(fields) != columns:
                        found = f"{len(fields)} columns"
                        raise _BadField("line", found, f"expected {columns} columns")  # noqa: TRY301 - as of a field
                    row = convert(fields)
                except _BadField as error:
                    column, value, reason = error.args
                    example = MalformedRow(
                        file=str(file),
                        line=number,
                        column=column,
                        value=shorten(value.encode("latin-1")),
                        reason=reason,
                    )
                    self.malformed += MalformedReport(1, (example,))
                else:
                    yield row


def _integer(column: str, text: str, low: int, high: int) -> int:
    readable = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    value = int(text) if readable else -1
    if not low <= value <= high:
        raise _BadField(column, text, f"expected an integer from {low} to {high}")
    return value


def _choice(column: str, text: str, choices: Sequence[str]) -> int:
    if text not in choices:
        raise _BadField(column, text, f"expected one of {', '.join(choices)}")
    return choices.index(text)


def _user_100k(fields: Sequence[str]) -> tuple[int, User]:
    user, age, gender, occupation, zip_code = fields
    years = _integer("age", age, 0, 150)
    return _integer("user", user, 0, MAX_ID), User(
        gender=_choice("gender", gender, "FM"),
        age=max(bisect.bisect_right(AGE_BUCKETS, years) - 1, 0),
        occupation=_choice("occupation", occupation, OCCUPATIONS_100K),
        zip_code=zip_code,
    )


def _user_1m(fields: Sequence[str]) -> tuple[int, User]:
    user, gender, age, occupation, zip_code = fields
    return _integer("user", user, 0, MAX_ID), User(
        gender=_choice("gender", gender, "FM"),
        age=_choice("age", age, tuple(map(str, AGE_BUCKETS))),
        occupation=_integer("occupation", occupation, 0, 20),
        zip_code=zip_code,
    )


def _item_100k(fields: Sequence[str]) -> tuple[int, Item]:
    flags = fields[5:]
    genres = tuple(genre for genre, flag in enumerate(flags) if _choice(GENRES[genre], flag, "01"))
    return _integer("item", fields[0], 0, MAX_ID), Item(_year(fields[1]), genres)


def _item_1m(fields: Sequence[str]) -> tuple[int, Item]:
    item, title, names = fields
    genres = tuple(_choice("genres", name, GENRES) for name in names.split("|"))
    return _integer("item", item, 0, MAX_ID), Item(_year(title), genres)


def _year(title: str) -> int | None:
    found = re.search(r"\((\d{4})\)\s*$", title)
    return int(found[1]) if found else None


LAYOUTS = (
    Layout("u.data", "u.item", "u.user", "\t", "|", _user_100k, _item_100k, 5 + len(GENRES)),
    Layout("ratings.dat", "movies.dat", "users.dat", "::", "::", _user_1m, _item_1m, 3),
)
