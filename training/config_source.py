"""`ConfigSource`: the plain values of a config, each with the place that it came from.

A source is read from YAML text, and ``key=value`` overrides are put into it;
`tessera.training.typed_config.build` makes typed values of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tessera.bounded_yaml import bounded_node, plain_value
from tessera.errors import UserError

Key = tuple[str, ...]


class ConfigError(UserError):
    """A config key or value that the user must change; the message is one line."""


@dataclass
class ConfigSource:
    """A tree of plain values together with the place that each of them came from.

    Attributes:
        values: the merged tree: mappings with string keys, lists, scalars.
        origins: the place of a key, e.g. ``("train", "seed") -> "demo.yaml:7"``.  A key without
            an entry has the place of its nearest parent.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, str] = field(default_factory=dict)

    def origin(self, key: Key) -> str:
        """The place that ``key``, or else its nearest parent, came from."""
        for length in range(len(key), -1, -1):
            found = self.origins.get(key[:length])
            if found is not None:
                return found
        return "the config"


def read_yaml(path: Path) -> ConfigSource:
    """Read a YAML file with the line of every key.

    Raises:
        ConfigError: the file is not text, not YAML, no mapping, or says a key twice.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error}); save it as such") from error
    return parse_yaml(text, name=str(path))


def parse_yaml(text: str, *, name: str) -> ConfigSource:
    """As `read_yaml`, from text; ``name`` stands for the file in messages."""
    source = ConfigSource(origins={(): name})
    try:
        node = bounded_node(text)
        if node is None:
            return source
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{name}: expected sections such as 'data:' at the top of the file")
        _record_lines(node, (), name, source.origins)
        source.values = plain_value(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from error
    return source


def _record_lines(node: yaml.MappingNode, prefix: Key, name: str, origins: dict[Key, str]) -> None:
    for key_node, value_node in node.value:
        key = (*prefix, str(key_node.value))
        place = f"{name}:{key_node.start_mark.line + 1}"
        if key in origins:
            raise ConfigError(f"{place}: {'.'.join(key)} is given twice; keep one of the two")
        origins[key] = place
        if isinstance(value_node, yaml.MappingNode):
            _record_lines(value_node, key, name, origins)


def apply_overrides(source: ConfigSource, overrides: Sequence[str]) -> ConfigSource:
    """``source`` with every ``dotted.key=value`` put in, later ones last; value is YAML.

    Raises:
        ConfigError: an override is not of that form or leads through something that is not
            a section.
    """
    result = ConfigSource(values=_copy_tree(source.values), origins=dict(source.origins))
    for override in overrides:
        dotted, equals, text = override.partition("=")
        key = tuple(dotted.strip().split("."))
        place = f"override '{override}'"
        if not equals or not all(key):
            raise ConfigError(
                f"{place}: expected KEY=VALUE, such as train.seed=1; a list or mapping stands in"
                " quotes, such as 'model.over_layers=[128, 64]'"
            )
        try:
            node = bounded_node(text)
            value = None if node is None else plain_value(node)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{place}: the value is not valid YAML: {reason}; write a list as"
                f" '{dotted}=[a, b]' and a mapping as '{dotted}={{name: value}}', in quotes"
            ) from error
        section = result.values
        for depth, part in enumerate(key[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
                result.origins[key[:depth]] = place
            section = section[part]
            if not isinstance(section, dict):
                raise ConfigError(f"{place}: {'.'.join(key[:depth])} is a value, not a section")
        section[key[-1]] = value
        for known in [known for known in result.origins if known[: len(key)] == key]:
            del result.origins[known]
        result.origins[key] = place
    return result


def _copy_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_tree(item) for item in value]
    return value
