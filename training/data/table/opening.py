"""`open_table`: from paths and columns to the splits of a table."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera.errors import UserError
from tessera.training.data.columns import ColumnConfig
from tessera.training.data.dataset import DataSplits
from tessera.training.data.malformed import MalformedReport, MalformedRowError, Progress
from tessera.training.data.prepared import PreparedFolder, open_or_build
from tessera.training.data.remote import Location
from tessera.training.data.table.convert import PREPARED_FILE, convert, settle_text
from tessera.training.data.table.files import FoundFile, find_files
from tessera.training.data.table.follow import FolderStream, Follow
from tessera.training.data.table.index import (
    LEFT_OUT,
    Begins,
    RowIndex,
    SplitRule,
    TableSplit,
    write_index,
)
from tessera.training.data.table.parquet import (
    GROUP_BYTES,
    GROUP_ROWS,
    TableFile,
    cut_units,
)
from tessera.training.data.table.settle import TableColumns, settle, text_columns
from tessera.training.data.table.text import TextColumn
from tessera.training.data.table.view import TableDataset, TableView
from tessera.training.data.urls import cache_of_urls, is_url, local_path
from tessera.training.transforms.crosses import Cross
from tessera.training.transforms.target_statistics import TargetStatistic
from tessera.training.typed_config import to_plain

LAYOUT = 1
"""Goes up with every change of what is written, so that older prepared folders are stale."""

_log = logging.getLogger("tessera.data")


def open_table(
    paths: Mapping[str, tuple[str, ...]],
    *,
    columns: Mapping[str, ColumnConfig],
    crosses: dict[str, Cross],
    target_statistics: dict[str, TargetStatistic],
    user_id: str | None,
    item_id: str | None,
    split: TableSplit,
    split_column: str | None,
    held_out: tuple[float, float],
    begins: Begins,
    follow: Follow | None,
    seed: int,
    strict: bool,
    cache_dir: Path | None,
    progress: bool,
) -> DataSplits:
    """The splits of a table; the arguments are the fields of `TableConfig`.

    Raises:
        MalformedRowError: there is a malformed row and ``strict``.
        UserError: a file is missing, damaged, or does not fit the columns.
    """
    opener = _Opener(
        columns=columns,
        split_column=split_column,
        by_time=split == "time",
        strict=strict,
        cache_dir=cache_dir or _beside(paths["path"][0]),
        progress=progress,
    )
    made: dict[str, Any] = {
        "crosses": crosses,
        "target_statistics": target_statistics,
        "user_id": user_id,
        "item_id": item_id,
    }
    views: dict[str, Any] = {}
    if follow is None:
        rule = SplitRule(split=split, held_out=held_out, seed=seed, begins=begins)
        dataset = opener.open(find_files(paths["path"], "path"), rule)
        dataset.columns = dataclasses.replace(dataset.columns, **made)
        for number, name in enumerate(("train", "valid", "test")):
            views[name] = TableView(dataset, number)
    for name in ("valid", "test"):
        if paths[f"{name}_path"]:
            own = opener.open_whole(find_files(paths[f"{name}_path"], f"{name}_path"))
            views[name] = TableView(own, 0)
    if follow is not None:
        settled = views["valid"].dataset.table_columns
        described = dataclasses.replace(settled.columns, **made)
        folder = Path(paths["path"][0]).expanduser()
        views["train"] = FolderStream(folder, follow, opener, settled, described)
        views.setdefault("test", TableView(views["valid"].dataset, LEFT_OUT))  # no row of it
    if opener.malformed.total:
        _log.warning("%s", opener.malformed)
    return DataSplits(**views, malformed=opener.malformed)


def _beside(path: str) -> Path:
    """The folder of prepared files beside the data, or where none can be beside it."""
    path = local_path(path)
    if is_url(path):
        return cache_of_urls()
    where = Path(path).expanduser().absolute()
    while any(sign in str(where) for sign in "*?["):
        where = where.parent
    return where.with_name(f"{where.name}.cache")


@dataclass(kw_only=True)
class _Opener:
    """Opens the tables of one config, all with the same columns."""

    columns: Mapping[str, ColumnConfig]
    split_column: str | None
    by_time: bool
    strict: bool
    cache_dir: Path
    progress: bool
    malformed: MalformedReport = field(default_factory=MalformedReport)
    _text: list[TextColumn] | None = None
    _settled: TableColumns | None = None

    def open_whole(self, found: list[FoundFile]) -> TableDataset:
        """The rows of files of which none are held out."""
        return self.open(found, SplitRule(split="files", held_out=(0.0, 0.0), seed=0))

    def open(self, found: list[FoundFile], rule: SplitRule) -> TableDataset:
        files = [self._file(file) for file in found]
        columns = self._columns(files)
        units = cut_units(files, columns.feature_names())
        sources = list(dict.fromkeys(file.path for file in files))
        rows = sum(unit.rows for unit in units)

        def build(folder: Path) -> Mapping[str, Any]:
            with self._bar("Indexing", rows, "row") as advance:
                return write_index(files, units, columns, rule, folder=folder, progress=advance)

        options = {
            "layout": LAYOUT,
            "table": [[name, binary] for name, binary in columns.labels],
            "weight": columns.weight,
            "split": [columns.split, rule.split, list(rule.held_out), rule.seed, *rule.begins],
            "units": [[unit.file, unit.rows] for unit in units],
            "partitions": [file.partitions for file in files],
        }
        prepared = self._prepared("rows", sources, options, build)
        return TableDataset(files, units, columns, RowIndex.open(prepared))

    def _prepared(
        self,
        label: str,
        sources: list[Location],
        options: dict[str, Any],
        build: Callable[[Path], Mapping[str, Any]],
    ) -> PreparedFolder:
        prepared = open_or_build(
            self.cache_dir, label=label, sources=sources, options=options, build=build
        )
        report = MalformedReport.from_json(prepared.details["malformed"])
        self._refuse_under_strict(report)
        self.malformed += report
        return prepared

    def _refuse_under_strict(self, malformed: MalformedReport) -> None:
        if self.strict and malformed.total:
            raise MalformedRowError(malformed.examples[0])

    def _file(self, file: FoundFile) -> TableFile:
        """The file as Parquet, converted first where it is not, or has too large row groups."""
        partitions = {name: partition_value(value) for name, value in file.partitions.items()}
        if file.format == "parquet":
            opened = TableFile.open(file.path, file.path, partitions)
            rows, size = opened.largest_group(self._names(partitions))
            if rows <= GROUP_ROWS and size <= GROUP_BYTES:
                return opened
        text: list[TextColumn] = []
        if file.format in {"csv", "tsv", "jsonl"}:
            wanted = text_columns(self.columns, self.split_column, partitions, by_time=self.by_time)
            self._text = self._text or settle_text(file, wanted)
            text = self._text
        names = self._names(partitions)

        def build(folder: Path) -> Mapping[str, Any]:
            size = file.path.stat().st_size
            with self._bar(f"Preparing {file.path.name}", size, "B") as advance:
                details = convert(file, text, names, folder, advance)
            if not details["rows"]:
                report = MalformedReport.from_json(details["malformed"])
                first = f", the first of them {report.examples[0]}" if report.examples else ""
                raise UserError(
                    f"{file.path}: holds no row that can be read ({report.total} are malformed"
                    f"{first}); mend the file or leave it out"
                )
            return details

        options = {"layout": LAYOUT, "text": to_plain(text), "names": names}
        prepared = self._prepared(file.path.name, [file.path], options, build)
        return TableFile.open(prepared.path / PREPARED_FILE, file.path, partitions)

    def _names(self, partitions: Mapping[str, Any]) -> list[str]:
        """The columns that are read of a file."""
        wanted = [own.column or name for name, own in self.columns.items() if own.kind != "ignore"]
        wanted += [own.weights for own in self.columns.values() if own.weights is not None]
        wanted += [self.split_column] if self.split_column is not None else []
        return [name for name in dict.fromkeys(wanted) if name not in partitions]

    def _columns(self, files: list[TableFile]) -> TableColumns:
        """The columns, settled against the first file; every other must agree with it."""
        for file in files:
            settled = settle(self.columns, self.split_column, file.schema, file.source)
            self._settled = self._settled or settled
            if settled != self._settled:
                strings = {c.name for c in settled.columns.sparse if c.strings}
                others = {c.name for c in self._settled.columns.sparse if c.strings}
                name = min(strings ^ others)
                raise UserError(
                    f"{file.source}: column {name!r} has {'strings' if name in strings else 'integers'},"
                    f" but in {files[0].source} it has"
                    f" {'integers' if name in strings else 'strings'}; ids must be of one type"
                )
        assert self._settled is not None
        return self._settled if self._text is None else self._settled.with_separators(self._text)

    def _bar(self, what: str, total: int, unit: str) -> _Bar:
        return _Bar(
            tqdm(
                total=total,
                unit=unit,
                unit_scale=True,
                desc=what,
                disable=None if self.progress else True,  # None: only on a terminal
            ),
            self._refuse_under_strict,
        )


class _Bar:
    """A progress bar as what `Progress` is told to; a context."""

    def __init__(self, bar: Any, check: Callable[[MalformedReport], None]) -> None:
        self._bar, self._check = bar, check

    def __enter__(self) -> Progress:
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _advance(self, done: int, malformed: MalformedReport) -> None:
        self._check(malformed)
        self._bar.update(done)
        if malformed.total:
            self._bar.set_postfix_str(f"{malformed.total} malformed")


def partition_value(value: str | None) -> int | str | None:
    """The value of a folder's name: an integer where it is written as one."""
    if value is None:
        return None
    plain = value.lstrip("-").isdecimal() and str(int(value)) == value
    return int(value) if plain and abs(int(value)) < 1 << 63 else value
