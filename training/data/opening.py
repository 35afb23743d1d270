"""`open_data`: from a `DataConfig` to splits that can be trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera.errors import UserError
from tessera.training.data.config import DataConfig, Split
from tessera.training.data.dataset import Dataset, DatasetView, DataSplits, GrowingView
from tessera.training.data.malformed import MalformedReport, MalformedRowError, Progress
from tessera.training.data.prepared import PreparedFolder, open_or_build
from tessera.training.data.splits import split_rows

_log = logging.getLogger("tessera.data")


def open_data(config: DataConfig, *, progress: bool = True) -> DataSplits:
    """Open the data that ``config`` names, preparing its cache first where that is needed.

    Rows that could not be read are logged as a warning (logger ``tessera.data``) and are in
    the result's ``malformed``.

    Args:
        config: the ``data:`` section.
        progress: show a progress bar on a terminal while text is parsed.

    Raises:
        MalformedRowError: there is a malformed row and ``config.strict``.
        UserError: a file is missing or unreadable, the cache cannot be written, or there is
            no row to train on.
    """
    splits = config.open(progress=progress)
    malformed = splits.malformed
    if not isinstance(splits.train, GrowingView) and not len(splits.train):
        rows = sum(map(len, (splits.train, splits.valid, splits.test))) + malformed.total
        named = f"path={', '.join(config.paths())}" if config.paths() else f"format={config.format}"
        told = f"; {malformed.total} are malformed" if malformed.total else ""
        first = f" ({malformed.examples[0]})" if malformed.examples else ""
        raise UserError(
            f"{named}: of {rows} rows none is left to train on{told}{first}; give a file with others, or"
            " hold fewer back"
        )
    return splits


@dataclass(frozen=True)
class Source:
    """How the files of one path field are prepared, and opened once they are.

    Attributes:
        files: what is read.
        options: what the prepared folder depends on besides them.
        write: writes what it has read into an empty folder, and tells of its progress.
        opened: the rows of a prepared folder.
    """

    files: list[Path]
    options: dict[str, Any]
    write: Callable[[Path, Progress], Mapping[str, Any]]
    opened: Callable[[PreparedFolder], Dataset]


def open_sources(
    config: DataConfig, source: Callable[[str], Source], *, split: Split, progress: bool
) -> DataSplits:
    """The splits of a format whose rows are prepared as a whole.

    Args:
        config: its section.
        source: what a field with paths, of this name, stands for.
        split: how the rows of ``path`` are cut.
        progress: as of `open_data`.
    """
    dataset, folder, malformed = _open_source(config, "path", source("path"), progress=progress)
    rows = split_rows(
        len(dataset),
        split=split,
        held_out=config.held_out(),
        seed=config.split_seed,
        prepared=folder,
    )
    views = {
        name: DatasetView(dataset, part)
        for name, part in zip(("train", "valid", "test"), rows, strict=True)
    }
    for name in ("valid", "test"):
        field = f"{name}_path"
        if config.paths(field):
            own, _, report = _open_source(config, field, source(field), progress=progress)
            views[name] = DatasetView(own, range(len(own)))
            malformed += report
    return DataSplits(**views, malformed=malformed)


def _open_source(
    config: DataConfig, field: str, reader: Source, *, progress: bool
) -> tuple[Dataset, Path, MalformedReport]:
    """The dataset of one path field, with its prepared folder and what was left out of it."""
    path = Path(config.paths(field)[0]).expanduser()
    beside = path.absolute().with_name(f"{path.absolute().name}.cache")

    def build(folder: Path) -> Mapping[str, Any]:
        with tqdm(
            total=sum(file.stat().st_size for file in reader.files),
            unit="B",
            unit_scale=True,
            desc=f"Preparing {path.name}",
            disable=None if progress else True,  # None: only on a terminal
        ) as bar:

            def advance(source_bytes: int, malformed: MalformedReport) -> None:
                _refuse_under_strict(config, malformed)
                bar.update(source_bytes)
                if malformed.total:
                    bar.set_postfix_str(f"{malformed.total} malformed")

            details = reader.write(folder, advance)
        if not details["rows"]:  # a cache without rows is not kept
            malformed = MalformedReport.from_json(details["malformed"])
            first = f", the first of them {malformed.examples[0]}" if malformed.examples else ""
            raise UserError(
                f"{field}='{path}': no line of it is a row of the format {config.format}"
                f" ({malformed.total} are malformed{first}); give another path or data.format"
            )
        return details

    prepared = open_or_build(
        Path(config.cache_dir).expanduser() if config.cache_dir else beside,
        label=path.name,
        sources=reader.files,
        options={"format": config.format, **reader.options},
        build=build,
    )
    malformed = MalformedReport.from_json(prepared.details["malformed"])
    _refuse_under_strict(config, malformed)  # the cache may have been made without `strict`
    if malformed.total:
        _log.warning("%s", malformed)
    return reader.opened(prepared), prepared.path, malformed


def _refuse_under_strict(config: DataConfig, malformed: MalformedReport) -> None:
    if config.strict and malformed.total:
        raise MalformedRowError(malformed.examples[0])
