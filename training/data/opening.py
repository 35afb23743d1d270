"""`open_data`: from a `DataConfig` to splits that can be trained on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tessera.errors import UserError
from tessera.training.data.config import DataConfig
from tessera.training.data.criteo import LAYOUT as CRITEO_LAYOUT
from tessera.training.data.criteo import CriteoDataset, write_criteo
from tessera.training.data.dataset import Dataset, DatasetView, DataSplits
from tessera.training.data.malformed import MalformedReport, MalformedRowError
from tessera.training.data.movielens import LAYOUT as MOVIELENS_LAYOUT
from tessera.training.data.movielens import MovieLensDataset, write_movielens
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
    train, valid, test = (DatasetView(dataset, part) for part in rows)
    if config.valid_path:
        valid, report = _whole(config, "valid_path", progress=progress)
        malformed += report
    if config.test_path:
        test, report = _whole(config, "test_path", progress=progress)
        malformed += report
    if not len(train):
        first = f" ({malformed.examples[0]})" if malformed.examples else ""
        raise UserError(
            f"path={config.path!r}: of {len(dataset)} rows none is left to train on; {malformed.total}"
            f" malformed ones were left out{first}"
        )
    return DataSplits(train, valid, test, malformed)


def _whole(
    config: DataConfig, field: str, *, progress: bool
) -> tuple[DatasetView, MalformedReport]:
    dataset, _, malformed = _open_paths(config, field, progress=progress)
    return DatasetView(dataset, range(len(dataset))), malformed


def _open_paths(
    config: DataConfig, field: str, *, progress: bool
) -> tuple[Dataset, Path, MalformedReport]:
    """The dataset of one path field, with its prepared folder and what was left out of it."""
    paths = tuple(Path(path).expanduser() for path in config.paths(field))
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else _beside(paths[0])
    if config.format == "movielens":
        prepared = _prepare_movielens(config, paths[0], cache)
    else:
        prepared = _prepare_criteo(config, paths, cache, field=field, progress=progress)
    malformed = MalformedReport.from_json(prepared.details["malformed"])
    if config.strict and malformed.total:  # the cache was made without `strict`
        raise MalformedRowError(malformed.examples[0])
    if malformed.total:
        _log.warning("%s", malformed)
    dataset: Dataset
    if config.format == "movielens":
        dataset = MovieLensDataset(prepared.path, max_history=config.max_history)
    else:
        dataset = CriteoDataset(prepared.path, rows=prepared.details["rows"])
    return dataset, prepared.path, malformed


def _beside(path: Path) -> Path:
    path = path.absolute()
    return path.with_name(f"{path.name}.cache")


def _prepare_movielens(config: DataConfig, source: Path, cache: Path) -> PreparedFolder:
    layout = find_layout(source)

    def build(folder: Path) -> Mapping[str, Any]:
        details = write_movielens(
            folder, source, positive_rating=config.positive_rating, strict=config.strict
        )
        return _with_rows(details, f"path='{source}'", "movielens")

    return open_or_build(
        cache,
        label=source.name,
        sources=[source / name for name in (layout.ratings, layout.items, layout.users)],
        options={
            "format": "movielens",
            "layout": MOVIELENS_LAYOUT,
            "positive_rating": config.positive_rating,
        },
        build=build,
    )


def _prepare_criteo(
    config: DataConfig, paths: tuple[Path, ...], cache: Path, *, field: str, progress: bool
) -> PreparedFolder:
    files = [file for path in paths for file in _criteo_files(path, field)]

    def build(folder: Path) -> Mapping[str, Any]:
        total = sum(file.stat().st_size for file in files)
        # disable=None: only on a terminal.
        with tqdm(
            total=total,
            unit="B",
            unit_scale=True,
            desc=f"Preparing {paths[0].name}",
            disable=None if progress else True,
        ) as bar:

            def advance(source_bytes: int, malformed: MalformedReport) -> None:
                bar.update(source_bytes)
                if malformed.total:
                    bar.set_postfix_str(f"{malformed.total} malformed")

            details = write_criteo(
                folder, files, workers=config.workers, strict=config.strict, progress=advance
            )
        return _with_rows(details, f"{field}='{paths[0]}'", "criteo")

    return open_or_build(
        cache,
        label=paths[0].name,
        sources=files,
        options={"format": "criteo", "layout": CRITEO_LAYOUT},
        build=build,
    )


def _with_rows(details: Mapping[str, Any], source: str, name: str) -> Mapping[str, Any]:
    """What a reader found, if that is at least one row; a cache without rows is not kept."""
    if details["rows"]:
        return details
    malformed = MalformedReport.from_json(details["malformed"])
    first = f", the first of them {malformed.examples[0]}" if malformed.examples else ""
    raise UserError(
        f"{source}: no line of it is a row of the format {name} ({malformed.total} are malformed"
        f"{first}); give another path or data.format"
    )


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
