"""`open_data`: from a `DataConfig` to splits that can be trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera.errors import UserError
from tessera.training.data import criteo, movielens
from tessera.training.data.config import DataConfig
from tessera.training.data.dataset import Dataset, DatasetView, DataSplits
from tessera.training.data.malformed import MalformedReport, MalformedRowError, Progress
from tessera.training.data.movielens_read import find_layout
from tessera.training.data.prepared import PreparedFolder, open_or_build
from tessera.training.data.splits import split_rows

_CRITEO_ENDINGS = (".tsv", ".txt", ".tsv.gz", ".txt.gz")

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
    dataset, folder, malformed = _open_paths(config, "path", progress=progress)
    rows = split_rows(
        len(dataset),
        split=config.split,
        held_out=config.held_out(),
        seed=config.split_seed,
        prepared=folder,
    )
    views = {
        name: DatasetView(dataset, part)
        for name, part in zip(("train", "valid", "test"), rows, strict=True)
    }
    for name in ("valid", "test"):
        if config.paths(f"{name}_path"):
            own, _, report = _open_paths(config, f"{name}_path", progress=progress)
            views[name] = DatasetView(own, range(len(own)))
            malformed += report
    if not len(views["train"]):
        first = f" ({malformed.examples[0]})" if malformed.examples else ""
        raise UserError(
            f"path={config.path!r}: of {len(dataset)} rows none is left to train on; {malformed.total}"
            f" malformed ones were left out{first}"
        )
    return DataSplits(**views, malformed=malformed)


@dataclass(frozen=True)
class _Reader:
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


def _criteo(config: DataConfig, paths: tuple[Path, ...], field: str) -> _Reader:
    files = [file for path in paths for file in _criteo_files(path, field)]
    return _Reader(
        files=files,
        options={"layout": criteo.LAYOUT},
        write=partial(criteo.write_criteo, files, config.workers),
        opened=lambda found: criteo.CriteoDataset(found.path, rows=found.details["rows"]),
    )


def _movielens(config: DataConfig, paths: tuple[Path, ...], _field: str) -> _Reader:
    (source,) = paths
    return _Reader(
        files=find_layout(source).files(source),
        options={"layout": movielens.LAYOUT, "positive_rating": config.positive_rating},
        write=partial(movielens.write_movielens, source, config.positive_rating),
        opened=lambda found: movielens.MovieLensDataset(found.path, max_history=config.max_history),
    )


_READERS = {"criteo": _criteo, "movielens": _movielens}


def _open_paths(
    config: DataConfig, field: str, *, progress: bool
) -> tuple[Dataset, Path, MalformedReport]:
    """The dataset of one path field, with its prepared folder and what was left out of it."""
    paths = tuple(Path(path).expanduser() for path in config.paths(field))
    beside = paths[0].absolute().with_name(f"{paths[0].absolute().name}.cache")
    reader = _READERS[config.format](config, paths, field)

    def build(folder: Path) -> Mapping[str, Any]:
        with tqdm(
            total=sum(file.stat().st_size for file in reader.files),
            unit="B",
            unit_scale=True,
            desc=f"Preparing {paths[0].name}",
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
                f"{field}='{paths[0]}': no line of it is a row of the format {config.format}"
                f" ({malformed.total} are malformed{first}); give another path or data.format"
            )
        return details

    prepared = open_or_build(
        Path(config.cache_dir).expanduser() if config.cache_dir else beside,
        label=paths[0].name,
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


def _criteo_files(path: Path, field: str) -> list[Path]:
    """The files that a path of the config stands for."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(f"{field}='{path}': no such file or folder; name one that is there")
        return [path]
    files = sorted(file for file in path.iterdir() if file.name.endswith(_CRITEO_ENDINGS))
    if not files:
        endings = ", ".join(_CRITEO_ENDINGS)
        raise UserError(f"{field}='{path}': no file in it ends in {endings}; name one")
    return files
