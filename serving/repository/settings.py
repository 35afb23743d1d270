"""``serving.yaml`` of a model: which versions are served, under which labels, with which shares of the calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tessera.bounded_yaml import bounded_node, plain_value
from tessera.errors import UserError, refuse_unknown
from tessera.serving.repository.folder import SERVING_NAME
from tessera.serving.repository.names import LABEL_RULE, is_label, is_version
from tessera.serving.repository.small_file import read_small_file

MAX_SETTINGS_BYTES = 64 * 1024

_WHOLE = 100.0
_ROUNDING = 1e-6
_SHOWN = 60


@dataclass(frozen=True)
class Latest:
    """Chooses the ``count`` highest versions."""

    count: int = 1

    def choose(self, present: frozenset[int]) -> frozenset[int]:
        """The chosen ones of ``present``."""
        return frozenset(sorted(present)[-self.count :])


@dataclass(frozen=True)
class Every:
    """Chooses all versions."""

    def choose(self, present: frozenset[int]) -> frozenset[int]:
        """The chosen ones of ``present``."""
        return present


@dataclass(frozen=True)
class Listed:
    """Chooses those of ``versions`` that are there."""

    versions: frozenset[int]

    def choose(self, present: frozenset[int]) -> frozenset[int]:
        """The chosen ones of ``present``."""
        return self.versions & present


@dataclass(frozen=True)
class Shadow:
    """A version that computes ``percent`` of the calls, too, and never answers."""

    version: int
    percent: float


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What a model's serving.yaml says.

    Attributes:
        versions: which of the folder's versions are chosen.
        labels: names for versions.
        traffic: percent by label, 100 in sum; empty: calls are not shared.
        shadow: see `Shadow`.
        batching: limits of this model in the place of those of the server's flags, by `BATCHING_KEYS`.
    """

    versions: Latest | Every | Listed = field(default_factory=Latest)
    labels: Mapping[str, int] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    shadow: Shadow | None = None
    batching: Mapping[str, int] = field(default_factory=dict)


BATCHING_KEYS: Mapping[str, int] = {
    "max_batch_samples": 1,
    "max_batch_ids": 1,
    "max_delay_us": 0,
    "max_queue_requests": 1,
    "max_queue_samples": 1,
}
"""The limits that `ServingSettings.batching` may hold, with the least value of each."""

_MOST_DELAY_US = 60_000_000


def read_settings(model_folder: Path) -> ServingSettings:
    """The serving.yaml in a model's folder; the defaults where there is none.

    Raises:
        UserError: one line that names the file, the key, the value and the remedy.
    """
    path = model_folder / SERVING_NAME
    content = read_small_file(path, MAX_SETTINGS_BYTES)
    return ServingSettings() if content is None else parse_settings(content, str(path))


def parse_settings(content: bytes, name: str) -> ServingSettings:
    """The settings that ``content`` writes down; ``name`` stands for the file in messages.

    Raises:
        UserError: see `read_settings`.
    """
    values = _plain(content, name)
    for key in values:
        refuse_unknown(f"{name}: key", key, list(_READERS))
    found = {key: _READERS[key](f"{name}: {key}", value) for key, value in values.items()}
    settings = ServingSettings(**found)
    if settings.traffic and not math.isclose(
        total := sum(settings.traffic.values()), _WHOLE, abs_tol=_ROUNDING
    ):
        raise UserError(
            f"{name}: traffic is {total:g} percent in sum; let its shares be 100 in sum"
        )
    return settings


def _plain(content: bytes, name: str) -> dict[str, Any]:
    try:
        node = bounded_node(content.decode(), aliases=False)
        if node is None:
            return {}
        _refuse_keys_given_twice(node, name)
        value = plain_value(node)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({error.reason}); save it as such") from error
    except yaml.YAMLError as error:
        raise UserError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"{name}: expected keys such as 'versions: {{latest: 2}}' at the top of the file"
        )
    return value


def _refuse_keys_given_twice(node: yaml.Node, name: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for each in node.value:
            _refuse_keys_given_twice(each, name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in seen:
            line = key.start_mark.line + 1
            raise UserError(
                f"{name}: {key.value} is given twice (line {line}); keep one of the two"
            )
        seen.add(key.value)
        _refuse_keys_given_twice(value, name)


def _refuse(where: str, value: object, remedy: str) -> NoReturn:
    shown = re.sub(r"\s+", " ", repr(value))
    raise UserError(f"{where} is {shown[:_SHOWN]}; {remedy}")


def _read_versions(where: str, value: Any) -> Latest | Every | Listed:
    if value == "all":
        return Every()
    if isinstance(value, list):
        for each in value:
            if not is_version(each):
                _refuse(f"{where}: a version", each, "give a positive whole number")
        if not value or len(set(value)) < len(value):
            _refuse(where, value, "give at least one version, and each once")
        return Listed(frozenset(value))
    if isinstance(value, dict) and list(value) == ["latest"]:
        if not is_version(value["latest"]):
            _refuse(f"{where}.latest", value["latest"], "give how many, a positive whole number")
        return Latest(value["latest"])
    _refuse(where, value, "give {latest: N}, all, or a list such as [3, 7]")


def _mapping(where: str, value: Any, example: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        _refuse(where, value, f"give a mapping such as {example}")
    return value


def _read_labels(where: str, value: Any) -> dict[str, int]:
    labels = _mapping(where, value, "{stable: 3}")
    for label, version in labels.items():
        if not isinstance(label, str) or not is_label(label):
            _refuse(f"{where}: a label", label, f"give {LABEL_RULE}")
        if not is_version(version):
            _refuse(f"{where}.{label}", version, "give a version, a positive whole number")
    return labels


def _is_percent(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _WHOLE


def _read_traffic(where: str, value: Any) -> dict[str, float]:
    shares = _mapping(where, value, "{stable: 95, canary: 5}")
    for label, percent in shares.items():
        if not isinstance(label, str) or not is_label(label):
            _refuse(f"{where}: a label", label, f"give {LABEL_RULE}")
        if not _is_percent(percent):
            _refuse(f"{where}.{label}", percent, "give a percentage from 0 to 100")
    return {label: float(percent) for label, percent in shares.items()}


def _read_shadow(where: str, value: Any) -> Shadow:
    shadow = _mapping(where, value, "{version: 4, share: 10}")
    for key in shadow:
        refuse_unknown(f"{where}: key", key, ["version", "share"])
    if not is_version(shadow.get("version")):
        _refuse(
            f"{where}.version", shadow.get("version"), "give a version, a positive whole number"
        )
    percent = shadow.get("share", _WHOLE)
    if not _is_percent(percent) or percent == 0:
        _refuse(f"{where}.share", percent, "give a percentage above 0 and up to 100")
    return Shadow(shadow["version"], float(percent))


def _read_batching(where: str, value: Any) -> dict[str, int]:
    limits = _mapping(where, value, "{max_batch_samples: 256}")
    for key, limit in limits.items():
        refuse_unknown(f"{where}: key", key, list(BATCHING_KEYS))
        least = BATCHING_KEYS[key]
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < least:
            _refuse(f"{where}.{key}", limit, f"give a whole number of at least {least}")
        if key == "max_delay_us" and limit > _MOST_DELAY_US:
            _refuse(f"{where}.{key}", limit, f"give {_MOST_DELAY_US} at most")
    return limits


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "versions": _read_versions,
    "labels": _read_labels,
    "traffic": _read_traffic,
    "shadow": _read_shadow,
    "batching": _read_batching,
}
