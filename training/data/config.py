"""`DataConfig`: the ``data:`` section of a training config.

`DataConfig` holds what every format has: how rows are held out.  Each format adds fields of its own in
a module of `tessera.training.data.formats`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data.urls import check_url, is_url
from tessera.training.variants import Variants

if TYPE_CHECKING:
    from tessera.training.data.dataset import DataSplits

DEFAULT_FRACTION = 0.1
"""Share of the rows for validation, and for test, where the config does not say."""

Paths = str | tuple[str, ...]
Split = Literal["random", "time"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data is read, and how it is cut into splits.

    ``DataConfig(format="criteo", ...)`` makes the subclass that is registered under that name, and
    ``DataConfig(factory="pkg.module:function", ...)`` the one for data of the user's own.

    Attributes:
        format: the format's name.
        cache_dir: folder of the prepared files that are kept between runs; None: the format's own
            place for them.
        valid_fraction (share): share of the rows held out for validation, in [0, 1); None: 0.1, or 0 where
            ``valid_path`` is given.
        test_fraction (share): the same for the test.
        split_seed: seed of ``split: random``; another seed holds out other rows.
        strict: refuse the data at its first malformed row instead of leaving such rows out,
            counting and reporting them.

    Raises:
        UserError: naming field, value and remedy.
    """

    variants: ClassVar[Variants] = Variants(
        "format",
        default=None,
        implied={"factory": "custom"},
        package="tessera.training.data.formats",
    )

    takes_urls: ClassVar[bool] = False
    """Whether paths may be URLs."""

    format: str
    cache_dir: str | None = None
    valid_fraction: float | None = None
    test_fraction: float | None = None
    split_seed: int = 0
    strict: bool = False

    def __new__(cls, **fields: Any) -> DataConfig:  # noqa: PYI034 - of a subclass
        """An instance of the format that the fields name, as `pathlib.Path` does it."""
        if cls is DataConfig:
            cls = cls.variants.find(cls.variants.chosen(fields))  # noqa: PLW0642 - the subclass
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in self.path_fields():
            self._check_paths(name)
        if "path" in self.path_fields() and not self.paths("path"):
            raise UserError(
                f"path={self.paths('path')!r}: name a file, a list of files or a folder"
            )
        if self.cache_dir is not None and not self.cache_dir:
            raise UserError("cache_dir='': name a folder, or leave it out")
        if self.cache_dir is not None and is_url(self.cache_dir):
            raise UserError(
                f"cache_dir={self.cache_dir!r}: prepared files are local; name a folder"
            )
        self._check_fractions()
        check.not_negative(self, "split_seed")

    def open(self, *, progress: bool) -> DataSplits:
        """The data, its prepared files made first where that is needed; see `open_data`."""
        raise NotImplementedError

    @classmethod
    def path_fields(cls) -> tuple[str, ...]:
        """The names of the fields that hold paths of data."""
        names = {item.name for item in dataclasses.fields(cls)}
        return tuple(name for name in ("path", "valid_path", "test_path") if name in names)

    def _check_paths(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (str, tuple)):
            raise UserError(f"{name}={value!r}: give a path, or a tuple of paths")
        if not all(self.paths(name)):
            raise UserError(f"{name}={value!r}: an empty path; leave it out")
        for path in self.paths(name):
            check_url(path, name)
            if is_url(path) and not self.takes_urls:
                raise UserError(
                    f"{name}={path!r}: format {self.format} reads local files; give a path, or use"
                    " format table"
                )

    def _check_fractions(self) -> None:
        check.share(self, "valid_fraction test_fraction")
        for which in ("valid", "test"):
            fraction = getattr(self, f"{which}_fraction")
            if fraction and self.paths(f"{which}_path"):
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
        value: Paths = getattr(self, name, ())
        return (value,) if isinstance(value, str) else value

    def held_out(self) -> tuple[float, float]:
        """The shares of the rows for (validation, test), defaults filled in."""
        valid, test = (
            0.0 if self.paths(path) else DEFAULT_FRACTION for path in ("valid_path", "test_path")
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
            return path if is_url(path) else str((base / Path(path).expanduser()).absolute())

        changed: dict[str, Any] = {}
        for name in (*self.path_fields(), "cache_dir"):
            value = getattr(self, name)
            if isinstance(value, str):
                changed[name] = absolute(value)
            elif value is not None:
                changed[name] = tuple(map(absolute, value))
        return dataclasses.replace(self, **changed)


data_format = DataConfig.variants.add
"""Registers a subclass of `DataConfig` under the default of its field ``format``."""
