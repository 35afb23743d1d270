"""`DataConfig`: the ``data:`` section of a training config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check

DEFAULT_FRACTION = 0.1
"""Share of the rows for validation, and for test, where the config does not say."""

Paths = str | tuple[str, ...]
Format = Literal["criteo", "movielens"]
Split = Literal["random", "time"]


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

    format: Format
    path: Paths
    valid_path: Paths = ()
    test_path: Paths = ()
    cache_dir: str | None = None
    split: Split = "random"
    valid_fraction: float | None = None
    test_fraction: float | None = None
    split_seed: int = 0
    strict: bool = False
    workers: int = 2
    positive_rating: int = 4
    max_history: int = 50

    def __post_init__(self) -> None:
        check.one_of(self, "format", Format)
        check.one_of(self, "split", Split)
        for name in ("path", "valid_path", "test_path"):
            self._check_paths(name)
        if not self.paths("path"):
            raise UserError(f"path={self.path!r}: name a file, a list of files or a folder")
        if self.cache_dir is not None and not self.cache_dir:
            raise UserError("cache_dir='': name a folder, or leave it out for '<path>.cache'")
        self._check_fractions()
        check.not_negative(self, "split_seed workers")
        remedy = "MovieLens rates from 1 to 5; give one of these"
        check.allowed(self, "positive_rating", lambda value: 1 <= value <= 5, remedy)
        check.at_least_one(self, "max_history")

    def _check_paths(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (str, tuple)):
            raise UserError(f"{name}={value!r}: give a path, or a tuple of paths")
        if not all(self.paths(name)):
            raise UserError(f"{name}={value!r}: an empty path; leave it out")
        if self.format != "movielens":
            return
        if name == "path" and len(self.paths(name)) != 1:
            raise UserError(f"path={value!r}: give MovieLens' one folder")
        if name != "path" and value:
            remedy = "only Criteo files can be split by hand; leave it out"
            raise UserError(f"{name}={value!r}: {remedy}")

    def _check_fractions(self) -> None:
        check.share(self, "valid_fraction test_fraction")
        for which in ("valid", "test"):
            fraction = getattr(self, f"{which}_fraction")
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
        valid, test = (
            0.0 if path else DEFAULT_FRACTION for path in (self.valid_path, self.test_path)
        )
        return (
            valid if self.valid_fraction is None else self.valid_fraction,
            test if self.test_fraction is None else self.test_fraction,
        )

    def resolved(self, base: Path) -> DataConfig:
        """The same config with every path absolute, relative ones taken from ``base``.

        What a run folder or a checkpoint stores, so that it means the same files when it is
        read from another working directory.
        """

        def absolute(path: str) -> str:
            return str((base / Path(path).expanduser()).absolute())

        changed: dict[str, Any] = {}
        for name in ("path", "valid_path", "test_path", "cache_dir"):
            value = getattr(self, name)
            if isinstance(value, str):
                changed[name] = absolute(value)
            elif value is not None:
                changed[name] = tuple(map(absolute, value))
        return dataclasses.replace(self, **changed)
