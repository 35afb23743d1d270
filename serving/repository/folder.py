"""What lies in a repository's folder: ``DIR/MODEL/VERSION/model.pt``, as far as that shows without reading it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tessera.serving.repository.names import (
    MAX_MODEL_NAME_BYTES,
    is_model_name,
    parse_version,
)

PACKAGE_NAME = "model.pt"
SERVING_NAME = "serving.yaml"
CONTROL_NAME = "control.json"


class Fingerprint(NamedTuple):
    """Which file a path leads to.  One that was replaced or written to has another, unless size and time are kept."""

    device: int
    inode: int
    bytes: int
    modified_ns: int


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The folder of one model.

    Attributes:
        name: the model's.
        path: the folder.
        versions: those that have a model.pt.
        remarks: one line for each thing in it that cannot be used.
    """

    name: str
    path: Path
    versions: Mapping[int, Fingerprint] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def package(self, version: int) -> Path:
        """Where the package of ``version`` lies."""
        return package_path(self.path, version)


def package_path(model_folder: Path, version: int) -> Path:
    """Where the package of a model's version lies."""
    return model_folder / str(version) / PACKAGE_NAME


@dataclass(frozen=True, kw_only=True)
class RepositoryFolder:
    """The models of one repository.

    Attributes:
        models: by name.
        remarks: one line for each name that cannot be a model's.
    """

    models: Mapping[str, ModelFolder]
    remarks: tuple[str, ...] = ()


def fingerprint(path: Path) -> Fingerprint | None:
    """That of the regular file at ``path``; None where there is none.

    Raises:
        OSError: the file system does not say, for another reason than that nothing is there.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Fingerprint(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def scan_model(path: Path) -> ModelFolder:
    """The versions of the model in the folder ``path``.

    Names that begin with a dot are passed over; so are versions without a model.pt, whose file may be
    on its way.

    Raises:
        OSError: the folder cannot be read.
    """
    versions: dict[int, Fingerprint] = {}
    remarks: list[str] = []
    for name in _folders(path):
        version = parse_version(name)
        if version is None:
            remarks.append(
                f"{path}/{_shown(name)}: '{_shown(name)}' is not a version; give the folder a positive "
                "number without leading zeros, or a name that begins with a dot"
            )
            continue
        package = package_path(path, version)
        try:
            found = fingerprint(package)
        except OSError as error:
            remarks.append(f"{package}: cannot be read ({error.strerror})")
            continue
        if found is not None:
            versions[version] = found
        elif package.exists():
            remarks.append(f"{package}: is not a regular file")
    return ModelFolder(
        name=path.name, path=path, versions=dict(sorted(versions.items())), remarks=tuple(remarks)
    )


def scan_repository(path: Path) -> RepositoryFolder:
    """Every model in the folder ``path``, also those without versions, which a later scan may find.

    Raises:
        OSError: the folder cannot be read.
    """
    models: dict[str, ModelFolder] = {}
    remarks: list[str] = []
    for name in _folders(path):
        if not is_model_name(name):
            remarks.append(
                f"{path}/{_shown(name)}: '{_shown(name)}' is not a model's name; give the folder letters, "
                f"digits, '_', '-' and '.', at most {MAX_MODEL_NAME_BYTES} of them"
            )
            continue
        try:
            models[name] = scan_model(path / name)
        except OSError as error:
            remarks.append(f"{path / name}: cannot be read ({error.strerror})")
    return RepositoryFolder(models=models, remarks=tuple(remarks))


def _folders(path: Path) -> list[str]:
    """The names of the folders in ``path``, sorted, without those that begin with a dot."""
    with os.scandir(path) as entries:
        return sorted(
            entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
        )


def _shown(name: str) -> str:
    """``name`` as a line of a log can show it."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in name)
