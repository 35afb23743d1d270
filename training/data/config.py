"""`DataConfig`: the ``data:`` section of a training config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tessera.errors import UserError

DEFAULT_FRACTION = 0.1
"""Share of the rows for validation, and for test, where the config does not say."""

Paths = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which files are read, how they are cut into splits, and where their cache lies.

    Attributes:
        format: ``criteo``: label, 13 integers, 26 hex categories, tab-separated, ``.gz`` too.
            ``movielens``: a folder in MovieLens' 100K or 1M layout.
        path: a file, a list of files (read in that order), or a folder: of MovieLens, or of
            Criteo files (every ``.tsv``, ``.txt``, ``.tsv.gz`` and ``.txt.gz`` in it, by name).
        valid_path: Criteo files for validation; empty: a share of ``path`` is held out.
        test_path: Criteo files for the test; empty: a share of ``path`` is held out.
        cache_dir: folder of the prepared binary cache; None: ``<path>.cache`` beside the data.
        split: ``random``: the held-out rows are drawn with ``split_seed``.  ``time``: they are
            the last ones, first validation, then test; time is the order of the lines (Criteo)
            or the timestamps (MovieLens).
        valid_fraction: share of ``path``'s rows held out for validation, in [0, 1); None: 0.1,
            or 0 where ``valid_path`` is given.
        test_fraction: the same for the test.
        split_seed: seed of ``split: random``; another seed holds out other rows.
        strict: refuse the data at its first malformed row instead of leaving such rows out,
            counting and reporting them.
        workers: processes that parse Criteo files of more than 128 MiB; 0 or 1: none beside
            this one.
        positive_rating: MovieLens: ratings from this one on have label 1 and enter histories.
        max_history: MovieLens: a user's history holds at most this many ids, the latest ones.
    """

    format: Literal["criteo", "movielens"]
    path: Paths
    valid_path: Paths = ()
    test_path: Paths = ()
    cache_dir: str | None = None
    split: Literal["random", "time"] = "random"
    valid_fraction: float | None = None
    test_fraction: float | None = None
    split_seed: int = 0
    strict: bool = False
    workers: int = 2
    positive_rating: int = 4
    max_history: int = 50

    def __post_init__(self) -> None:
        if self.format not in ("criteo", "movielens"):
            raise UserError(f"format={self.format!r}: write 'criteo' or 'movielens'")
        if self.split not in ("random", "time"):
            raise UserError(f"split={self.split!r}: write 'random' or 'time'")
        for name in ("path", "valid_path", "test_path"):
            self._check_paths(name)
        if not self.paths("path"):
            raise UserError(f"path={self.path!r}: name a file, a list of files or a folder")
        if self.cache_dir is not None and not self.cache_dir:
            raise UserError("cache_dir='': name a folder, or leave it out for '<path>.cache'")
        self._check_fractions()
        if self.split_seed < 0:
            raise UserError(f"split_seed={self.split_seed}: give an integer from 0 on")
        if self.workers < 0:
            raise UserError(f"workers={self.workers}: give 0 or a number of processes")
        if not 1 <= self.positive_rating <= 5:
            raise UserError(
                f"positive_rating={self.positive_rating}: MovieLens rates from 1 to 5; give one"
                " of these"
            )
        if self.max_history < 1:
            raise UserError(f"max_history={self.max_history}: give at least 1 id per history")

    def _check_paths(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (str, tuple)):
            raise UserError(f"{name}={value!r}: give a path, or a tuple of paths")
        if any(not item for item in self.paths(name)):
            raise UserError(f"{name}={value!r}: an empty path; leave it out")
        if self.format == "movielens" and name != "path" and value:
            raise UserError(
                f"{name}={value!r}: only Criteo files can be split by hand; leave it out"
            )
        if self.format == "movielens" and name == "path" and len(self.paths(name)) != 1:
            raise UserError(f"path={value!r}: give MovieLens' one folder")

    def _check_fractions(self) -> None:
        for which in ("valid", "test"):
            fraction = getattr(self, f"{which}_fraction")
            if fraction is not None and not 0 <= fraction < 1:
                raise UserError(f"{which}_fraction={fraction}: give a share from 0 to below 1")
            if fraction and getattr(self, f"{which}_path"):
                raise UserError(
                    f"{which}_fraction={fraction}: {which}_path already says where those rows"
                    " come from; leave one of the two out"
                )
        valid, test = self.held_out()
        if valid + test >= 1:
            raise UserError(
                f"valid_fraction={valid}: with test_fraction={test} nothing is left to train on;"
                " their sum must be below 1"
            )

    def paths(self, name: str = "path") -> tuple[str, ...]:
        """The field ``name`` as a tuple of paths, as written; empty where it is not given."""
        value: Paths = getattr(self, name)
        return (value,) if isinstance(value, str) else value

    def held_out(self) -> tuple[float, float]:
        """The shares of ``path``'s rows for (validation, test), defaults filled in."""

        def share(fraction: float | None, paths: Paths) -> float:
            if fraction is not None:
                return fraction
            return 0.0 if paths else DEFAULT_FRACTION

        return (
            share(self.valid_fraction, self.valid_path),
            share(self.test_fraction, self.test_path),
        )

    def resolved(self, base: Path) -> DataConfig:
        """The same config with every path absolute, relative ones taken from ``base``.

        What a run folder or a checkpoint stores, so that it means the same files when it is
        read from another working directory.
        """

        def absolute(paths: Paths) -> Paths:
            if isinstance(paths, str):
                return str((base / Path(paths).expanduser()).absolute())
            return tuple(str((base / Path(path).expanduser()).absolute()) for path in paths)

        return dataclasses.replace(
            self,
            path=absolute(self.path),
            valid_path=absolute(self.valid_path),
            test_path=absolute(self.test_path),
            cache_dir=None if self.cache_dir is None else str(absolute(self.cache_dir)),
        )
