"""MovieLens 20M and 25M as streams of ratings (``ratings.csv`` and ``movies.csv``).

`tessera.training.data` reads the 100K and 1M layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe

from tessera.errors import UserError
from tessera.training.datasets.utils import LoadFiles, ReadLinesFromCSV, safe_cast

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_COLUMN_NAMES[1:]]

_KINDS: list[tuple[Callable[[Any], Any], Any]] = [
    (int, 0),
    (int, 0),
    (float, 0.0),
    (int, 0),
    (str, ""),
    (str, ""),
]
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    partial(safe_cast, dest_type=kind, default=default) for kind, default in _KINDS
]
"""These turn the texts of `DEFAULT_COLUMN_NAMES` into numbers where they stand for one."""


def _as_dict(row: list[str]) -> dict[str, float | int | str]:
    named = zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, row, strict=False)
    return {name: cast(text) for name, cast, text in named}


def movielens_20m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _as_dict,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The ratings of MovieLens 20M (https://grouplens.org/datasets/movielens/20m/).

    Args:
        root: the folder of the files.
        include_movies_data: whether each rating has its movie's title and genres.
        row_mapper: a line's texts to a sample; without one given, to a dict by column name; None: the
            texts themselves.
        **open_kw: further arguments of ``open``.

    Raises:
        UserError: while it is read: a rating is of a movie that ``movies.csv`` lacks.
    """
    lines = _lines(Path(root) / RATINGS_FILENAME, **open_kw)
    if include_movies_data:
        lines = lines.map(_Joined(Path(root) / MOVIES_FILENAME))
    return lines if row_mapper is None else lines.map(row_mapper)


def movielens_25m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _as_dict,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The ratings of MovieLens 25M (https://grouplens.org/datasets/movielens/25m/).

    Its files are laid out as those of `movielens_20m`, whose arguments these are.
    """
    return movielens_20m(
        root, include_movies_data=include_movies_data, row_mapper=row_mapper, **open_kw
    )


def _lines(path: Path, **open_kw: Any) -> IterDataPipe[Any]:
    return ReadLinesFromCSV(LoadFiles([str(path)], mode="r", **open_kw), skip_first_line=True)


class _Joined:
    """A rating's texts with those of its movie; the movies are read once."""

    def __init__(self, movies: Path) -> None:
        self._path = movies
        self._movies: dict[str, list[str]] = {row[0]: row[1:] for row in _lines(movies)}

    def __call__(self, rating: list[str]) -> list[str]:
        movie = self._movies.get(rating[1])
        if movie is None:
            raise UserError(f"{self._path}: movie {rating[1]} of {RATINGS_FILENAME} is not in it")
        return rating + movie
