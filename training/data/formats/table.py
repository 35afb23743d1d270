"""``format: table``: files of Parquet, CSV, JSON lines or Arrow, with columns that the config describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from tessera.errors import UserError
from tessera.training import field_checks as check
from tessera.training.data.columns import SPARSE_KINDS, ColumnConfig
from tessera.training.data.config import DataConfig, Paths, data_format
from tessera.training.data.dataset import DataSplits
from tessera.training.data.table.follow import Follow
from tessera.training.data.table.index import Moment, TableSplit
from tessera.training.data.table.opening import open_table
from tessera.training.data.urls import is_url
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.target_statistics import TargetStatistic


@data_format
@dataclass(frozen=True, kw_only=True)
class TableConfig(DataConfig):
    """Any table.

    Attributes:
        path: a file, a list of files, a pattern such as ``clicks/*.parquet``, or a folder with all
            files below it, each also as a URL such as ``s3://bucket/clicks/*.parquet``; folders
            named ``day=3`` give a column ``day``.  A file's name says its
            format: ``.parquet``, ``.csv``, ``.tsv``, ``.jsonl`` (each of the last three also with
            ``.gz``), ``.arrow`` or ``.feather``.
        valid_path: files for validation; empty: a share of ``path`` is held out.
        test_path: files for the test; empty: a share of ``path`` is held out.
        columns: what each column is; a column that is not named is not read.
        crosses: features that join several of ids, by name; the model makes them.
        target_statistics: dense values that say what a label was on average, by name; the model
            learns them from the training rows.
        user_id: the feature of kind categorical that says whose a row is, for models for retrieval.
        item_id: the feature of kind categorical that says which item a row is about.  With it the
            table may lack a column of kind label: every row is then a positive one.
        split: which rows of ``path`` are held out.  ``random``: drawn with ``split_seed``.
            ``time``: the latest by ``split_column``, first validation, then test.  ``hash``: those
            whose value of ``split_column`` has a hash in the share, so that all rows with the same
            value are in one split.  ``files``: none; ``valid_path`` and ``test_path`` say.
        split_column: the column that decides; None: under ``time`` the one of kind timestamp, under
            ``hash`` the one of kind group.
        follow: ``path`` is a folder in which files arrive while the run trains, and ``valid_path`` says
            the files for validation; None: all files are there.
        valid_from: under ``time``, the first moment of the validation rows, in the place of
            ``valid_fraction``: a date or a time (``2026-01-31``, ``2026-01-31 18:30``) where the
            column holds times, a number where it holds numbers.
        test_from: under ``time`` with ``valid_from``, the first moment of the test rows; None: there
            are none.
    """

    takes_urls: ClassVar[bool] = True

    format: Literal["table"] = "table"
    path: Paths
    valid_path: Paths = ()
    test_path: Paths = ()
    columns: dict[str, ColumnConfig] = field(default_factory=dict)
    crosses: dict[str, Cross] = field(default_factory=dict)
    target_statistics: dict[str, TargetStatistic] = field(default_factory=dict)
    user_id: str | None = None
    item_id: str | None = None
    split: TableSplit = "random"
    split_column: str | None = None
    follow: Follow | None = None
    valid_from: Moment | None = None
    test_from: Moment | None = None

    def __post_init__(self) -> None:
        check.one_of(self, "split", TableSplit)
        super().__post_init__()
        self._check_columns()
        if self.split == "files" and not self.valid_path:
            raise UserError("split='files': give the files for validation as valid_path")
        self._check_moments()
        self._check_follow()
        if self.split in {"random", "files"} and self.split_column is not None:
            raise UserError(
                f"split_column={self.split_column!r}: split {self.split} looks at no column; leave"
                " it out, or set split to time or hash"
            )
        if self.split in {"time", "hash"} and self.settled_split_column() is None:
            kind = "timestamp" if self.split == "time" else "group"
            raise UserError(
                f"split_column is missing: split {self.split} needs one; name it, or give a column"
                f" the kind {kind}"
            )

    def _check_moments(self) -> None:
        for name in ("valid_from", "test_from"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.split != "time":
                raise UserError(
                    f"{name}={value!r}: split {self.split} looks at no times; say split: time"
                )
            if self.valid_from is None:
                raise UserError(f"test_from={value!r}: say valid_from, too")
            for other in (name.replace("from", "fraction"), name.replace("from", "path")):
                if getattr(self, other):
                    raise UserError(
                        f"{name} and {other} both say which rows are held out; leave one out"
                    )

    def _check_follow(self) -> None:
        if self.follow is None:
            return
        if len(self.paths()) != 1 or is_url(self.paths()[0]):
            raise UserError(
                f"path={self.path!r}: files arrive in one local folder under follow; name it"
            )
        if self.split != "files":
            raise UserError(
                f"split={self.split!r}: what has not arrived cannot be split; set split: files, and"
                " valid_path to files for validation"
            )

    def _check_columns(self) -> None:
        kinds = [column.kind for column in self.columns.values()]
        if "label" not in kinds and self.item_id is None:
            raise UserError(
                "columns: none has the kind label; say what is to be predicted (tessera schema DATA"
                " writes a config for you), or, where every row is a positive one, name the item's id"
                " as item_id"
            )
        for key in ("user_id", "item_id"):
            name = getattr(self, key)
            if name is not None and (
                name not in self.columns or self.columns[name].kind != "categorical"
            ):
                ids = [n for n, own in self.columns.items() if own.kind == "categorical"]
                raise UserError(
                    f"{key}={name!r}: no column of kind categorical has this name; give one of"
                    f" {', '.join(ids) or 'them that kind'}"
                )
        if not set(kinds) & set(SPARSE_KINDS):
            raise UserError(
                f"columns: none has ids; a model needs one of kind {' or '.join(SPARSE_KINDS)}"
            )
        for kind in ("weight", "timestamp", "group"):
            if kinds.count(kind) > 1:
                named = [name for name, own in self.columns.items() if own.kind == kind]
                raise UserError(f"columns: {' and '.join(named)} have the kind {kind}; give it one")
        for name in self.columns:
            if not name or "." in name:
                raise UserError(
                    f"columns: {name!r} is not a feature's name; give one without a dot, and the"
                    " column's own name as its key column"
                )

    def settled_split_column(self) -> str | None:
        """The column that the split looks at, by its name in the files; None: it looks at none."""
        wanted = {"time": "timestamp", "hash": "group"}.get(self.split)
        if wanted is None or self.split_column is not None:
            return self.split_column
        named = (n for n, own in self.columns.items() if own.kind == wanted)
        name = next(named, None)
        return None if name is None else self.columns[name].column or name

    def held_out(self) -> tuple[float, float]:
        """See `DataConfig.held_out`; no share is under ``split: files`` or with ``valid_from``."""
        said = self.split == "files" or self.valid_from is not None
        return (0.0, 0.0) if said else super().held_out()

    def open(self, *, progress: bool) -> DataSplits:
        """See `DataConfig.open`."""
        return self.opened(self.columns, progress=progress)

    def opened(self, columns: Mapping[str, ColumnConfig], *, progress: bool) -> DataSplits:
        """The data with other columns than the config's; which rows are held out stays."""
        return open_table(
            {name: self.paths(name) for name in ("path", "valid_path", "test_path")},
            columns=columns,
            crosses=self.crosses,
            target_statistics=self.target_statistics,
            user_id=self.user_id,
            item_id=self.item_id,
            split=self.split,
            split_column=self.settled_split_column(),
            held_out=self.held_out(),
            begins=(self.valid_from, self.test_from),
            follow=self.follow,
            seed=self.split_seed,
            strict=self.strict,
            cache_dir=None if self.cache_dir is None else Path(self.cache_dir).expanduser(),
            progress=progress,
        )
