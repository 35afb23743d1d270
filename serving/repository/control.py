"""``control.json`` of a model: what has been asked for by calls, so that it outlives the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessera.durable import replacing
from tessera.errors import UserError, refuse_unknown
from tessera.serving.package.strict_json import read_strictly
from tessera.serving.repository.folder import CONTROL_NAME
from tessera.serving.repository.names import LABEL_RULE, is_label, is_version
from tessera.serving.repository.small_file import read_small_file

MAX_CONTROL_BYTES = 64 * 1024

_FORMAT = 1
_KEYS = ("format", "unloaded", "add", "remove", "labels")


@dataclass(frozen=True, kw_only=True)
class ControlRecord:
    """What calls have asked for.

    Attributes:
        unloaded: the whole model.
        add: versions that are wanted beside the chosen ones.
        remove: versions that are not chosen.
        labels: these win over those of serving.yaml.
    """

    unloaded: bool = False
    add: frozenset[int] = frozenset()
    remove: frozenset[int] = frozenset()
    labels: Mapping[str, int] = field(default_factory=dict)


def read_control(model_folder: Path) -> ControlRecord:
    """The control.json in a model's folder; the default where there is none.

    Raises:
        UserError: one line that names the file and what is wrong with it.
    """
    path = model_folder / CONTROL_NAME
    content = read_small_file(path, MAX_CONTROL_BYTES)
    return ControlRecord() if content is None else parse_control(content, str(path))


def write_control(model_folder: Path, record: ControlRecord) -> None:
    """Put ``record`` in its place as a whole: whoever reads the file finds the old one or this one.

    Raises:
        UserError: the folder cannot be written, or the record is too long; the old one is in its place.
    """
    path = model_folder / CONTROL_NAME
    content = (
        json.dumps(
            {
                "format": _FORMAT,
                "unloaded": record.unloaded,
                "add": sorted(record.add),
                "remove": sorted(record.remove),
                "labels": dict(sorted(record.labels.items())),
            }
        )
        + "\n"
    ).encode()
    if len(content) > MAX_CONTROL_BYTES:
        raise UserError(
            f"{path}: the record would have {len(content)} bytes, the limit is {MAX_CONTROL_BYTES}; "
            "unload versions or remove labels"
        )
    try:
        with replacing(path) as stream:
            stream.write(content)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def parse_control(content: bytes, name: str) -> ControlRecord:
    """The record that ``content`` writes down; ``name`` stands for the file in messages.

    Raises:
        UserError: see `read_control`.
    """
    try:
        found = read_strictly(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name}: is not JSON ({error}); write it anew or remove it") from error
    if not isinstance(found, dict):
        raise UserError(f"{name}: is not a JSON object; write it anew or remove it")
    for key in found:
        refuse_unknown(f"{name}: key", key, _KEYS)
    if found.get("format", _FORMAT) != _FORMAT:
        raise UserError(f"{name}: format is {found['format']!r}; this server reads {_FORMAT}")
    unloaded = found.get("unloaded", False)
    if not isinstance(unloaded, bool):
        raise UserError(f"{name}: unloaded is {unloaded!r}; give true or false")
    record = ControlRecord(
        unloaded=unloaded,
        add=_versions(name, "add", found.get("add", [])),
        remove=_versions(name, "remove", found.get("remove", [])),
        labels=_labels(name, found.get("labels", {})),
    )
    if both := record.add & record.remove:
        raise UserError(f"{name}: add and remove both have {min(both)}; leave it in one of them")
    return record


def _versions(name: str, key: str, value: Any) -> frozenset[int]:
    if not isinstance(value, list):
        raise UserError(f"{name}: {key} is {value!r}; give a list of versions")
    for each in value:
        if not is_version(each):
            raise UserError(f"{name}: {key} has {each!r}; give versions, positive whole numbers")
    return frozenset(value)


def _labels(name: str, value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise UserError(f"{name}: labels is {value!r}; give an object")
    for label, version in value.items():
        if not is_label(label):
            raise UserError(f"{name}: labels has {label!r}; give {LABEL_RULE}")
        if not is_version(version):
            raise UserError(
                f"{name}: labels.{label} is {version!r}; give a version, a positive whole number"
            )
    return value
