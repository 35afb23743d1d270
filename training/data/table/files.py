"""From the paths of a config to files, each with its format and the values that its folders name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from tessera.errors import UserError
from tessera.training.data.remote import Location, list_url
from tessera.training.data.urls import check_url, is_url, local_path

FileFormat = Literal["parquet", "csv", "tsv", "jsonl", "arrow"]

_ENDINGS: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".csv.gz": "csv",
    ".tsv": "tsv",
    ".tsv.gz": "tsv",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_PARTITION = re.compile(r"([^=]+)=(.*)")
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class FoundFile:
    """One file of a table.

    Attributes:
        path: where it is.
        format: how it is read.
        partitions: the columns that the names of its folders give (``day=3``), as text; None where
            the folder stands for a missing value.
    """

    path: Location
    format: FileFormat
    partitions: dict[str, str | None]


def find_files(paths: tuple[str, ...], field: str) -> list[FoundFile]:
    """The files that the config's ``field`` stands for, those of a folder or pattern by name.

    Raises:
        UserError: there is no such file, its name does not end as that of a known format, or its
            file system cannot be reached.
    """
    found = [file for path in paths for file in _found(path, field)]
    first = set(found[0].partitions)
    for file in found:
        if set(file.partitions) != first:
            raise UserError(
                f"{field}='{file.path}': its folders name the columns {_listed(file.partitions)}, but"
                f" those of {found[0].path} name {_listed(found[0].partitions)}; keep them alike"
            )
    return found


def files_below(folder: Path) -> list[FoundFile]:
    """The files of a known format in a local folder and below it, by name; maybe none."""
    files = (file.relative_to(folder) for file in sorted(folder.rglob("*")))
    return [
        _file(folder / file, "path", inside=file.parts)
        for file in files
        if _is_data(file.parts) and (folder / file).is_file()
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "(none)"


def _found(path: str, field: str) -> list[FoundFile]:
    path = local_path(path)
    if is_url(path):
        return _found_url(path, field)
    where = Path(path).expanduser()
    if where.is_dir():
        found = files_below(where)
        if not found:
            raise UserError(f"{field}='{path}': no file in it ends in {', '.join(_ENDINGS)}")
        return found
    if where.exists():
        return [_file(where, field, inside=(where.name,))]
    if any(sign in where.name for sign in "*?[") or "*" in str(where):
        anchor = Path(where.anchor) if where.is_absolute() else Path()
        parts = where.relative_to(where.anchor) if where.is_absolute() else where
        files = sorted(file for file in anchor.glob(str(parts)) if file.is_file())
        if not files:
            raise UserError(f"{field}='{path}': no file has such a name; mend the pattern")
        fixed = next(i for i, part in enumerate(where.parts) if any(c in part for c in "*?["))
        root = Path(*where.parts[:fixed])
        return [_file(file, field, inside=file.relative_to(root).parts) for file in files]
    raise UserError(f"{field}='{path}': no such file or folder; name one that is there")


def _found_url(url: str, field: str) -> list[FoundFile]:
    check_url(url, field)
    shown = url.partition("?")[0]
    listing = list_url(url)
    files = listing.files
    if listing.kind == "folder":
        files = [(file, inside) for file, inside in files if _is_data(inside)]
        if not files:
            raise UserError(
                f"{field}='{shown}': there is no such file, and none below it that ends in"
                f" {', '.join(_ENDINGS)}"
            )
    if not files:
        raise UserError(f"{field}='{shown}': no file has such a name; mend the pattern")
    return [_file(file, field, inside=inside) for file, inside in files]


def _is_data(inside: tuple[str, ...]) -> bool:
    """Whether a file of a folder is meant: of a known format, and not hidden by ``.`` or ``_``."""
    hidden = any(part.startswith((".", "_")) or part.endswith(".cache") for part in inside)
    return not hidden and _format(inside[-1]) is not None


def _format(name: str) -> FileFormat | None:
    name = name.lower()
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def _file(file: Location, field: str, *, inside: tuple[str, ...]) -> FoundFile:
    """A file of the names ``inside``, the last its own and the others of folders that may say columns."""
    kind = _format(file.name)
    if kind is None:
        raise UserError(f"{field}='{file}': its name must end in one of {', '.join(_ENDINGS)}")
    partitions: dict[str, str | None] = {}
    for part in inside[:-1]:
        if match := _PARTITION.fullmatch(part):
            value = unquote(match[2])
            partitions[match[1]] = None if value == _NULL_PARTITION else value
    return FoundFile(file, kind, partitions)
