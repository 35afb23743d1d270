"""What the folders of repositories hold now; it blocks on the file system."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import UserError
from tessera.serving.repository.control import ControlRecord, read_control
from tessera.serving.repository.folder import ModelFolder, scan_model, scan_repository
from tessera.serving.repository.names import is_model_name
from tessera.serving.repository.settings import ServingSettings, read_settings


@dataclass(frozen=True, kw_only=True)
class ModelReading:
    """A model's folder and files.

    Attributes:
        folder: its versions.
        settings: its serving.yaml; None: that has an error.
        record: its control.json; None: that has an error.
        errors: one line for each file that has one.
    """

    folder: ModelFolder
    settings: ServingSettings | None
    record: ControlRecord | None
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All repositories.

    Attributes:
        models: by name.
        unreadable: repositories that cannot be read: nothing is known of the models in them.
        remarks: one line for each thing that cannot be used.
    """

    models: Mapping[str, ModelReading] = field(default_factory=dict)
    unreadable: frozenset[Path] = frozenset()
    remarks: tuple[str, ...] = ()


def check_readable(repository: Path) -> None:
    """Look whether the folder ``repository`` can be read at all.

    Raises:
        UserError: it cannot.
    """
    try:
        os.scandir(repository).close()
    except OSError as error:
        raise UserError(
            f"--model-repository is '{repository}'; give a folder that can be read ({error.strerror})"
        ) from error


def read_repositories(repositories: Sequence[Path], taken: frozenset[str]) -> Reading:
    """Read every model of ``repositories`` whose name is not ``taken`` by ``--model``; the first of a name counts."""
    models: dict[str, ModelReading] = {}
    unreadable: set[Path] = set()
    remarks: list[str] = []
    for repository in repositories:
        try:
            found = scan_repository(repository)
        except OSError as error:
            unreadable.add(repository)
            remarks.append(f"{repository}: cannot be read ({error.strerror})")
            continue
        remarks += found.remarks
        for name, folder in found.models.items():
            remarks += folder.remarks
            if name in taken:
                remarks.append(
                    f"{folder.path}: --model gives a model of this name; it is not served"
                )
            elif name in models:
                first = models[name].folder.path
                remarks.append(f"{folder.path}: {first} has the same name; it is not served")
            else:
                models[name] = _read(folder)
                remarks += models[name].errors
    return Reading(models=models, unreadable=frozenset(unreadable), remarks=tuple(remarks))


def read_model(repositories: Sequence[Path], name: str) -> ModelReading | None:
    """Read the model ``name``; None where no repository has it.

    Raises:
        UserError: its folder cannot be read.
    """
    if not is_model_name(name):
        return None
    for repository in repositories:
        path = repository / name
        if not path.is_dir():
            continue
        try:
            return _read(scan_model(path))
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return None


def _read(folder: ModelFolder) -> ModelReading:
    settings = record = None
    errors: list[str] = []
    try:
        settings = read_settings(folder.path)
    except UserError as error:
        errors.append(str(error))
    try:
        record = read_control(folder.path)
    except UserError as error:
        errors.append(str(error))
    return ModelReading(folder=folder, settings=settings, record=record, errors=tuple(errors))
