"""From YAML text and ``key=value`` overrides to frozen, fully typed dataclasses, and back.

Knows nothing of training: `build` takes any tree of keyword-only dataclasses and checks
every value against its annotation, however deep.  Every error is one line that names where
the value came from (``file.yaml:12`` or the override), the full dotted key, the value and
what was expected; an unknown key also gets the nearest known one.

Annotations understood: ``bool``, ``int``, ``float``, ``str``, ``None``, ``Literal``, unions,
``tuple[X, ...]``, ``tuple[X, Y]``, ``list[X]``, ``dict[str, X]`` / ``Mapping[str, X]`` and
dataclasses.  A dataclass with a class attribute ``variants`` stands for the union of the variants
that are registered there; the section's tag chooses among them.
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime as dt
import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, Union

import yaml

from tessera.training.config_source import ConfigError, ConfigSource, Key
from tessera.training.variants import Variants

T = TypeVar("T")


def build(cls: type[T], source: ConfigSource) -> T:
    """The dataclass ``cls`` filled from ``source``.

    Raises:
        ConfigError: a key is unknown or missing, a value has the wrong type, or a dataclass's
            ``__post_init__`` raised `ValueError`.
    """
    return typing.cast("T", _Builder(source, cls).build(cls, source.values, ()))


def to_plain(value: Any) -> Any:
    """``value`` (dataclasses, tuples, mappings, scalars) as what YAML and JSON can say."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def to_yaml(value: Any) -> str:
    """YAML text from which `build` makes ``value`` again."""
    return yaml.safe_dump(to_plain(value), sort_keys=False, allow_unicode=True)


def differing_keys(left: Any, right: Any, prefix: str = "") -> list[str]:
    """Dotted keys at which two plain trees (see `to_plain`) differ, in the order of ``left``."""
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return [] if left == right else [prefix]
    keys: list[str] = []
    for key in [*left, *(key for key in right if key not in left)]:
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if key not in left or key not in right:
            keys.append(dotted)
        else:
            keys.extend(differing_keys(left[key], right[key], dotted))
    return keys


def leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """The values of a plain tree (see `to_plain`) by dotted key, as YAML on one line."""
    if isinstance(tree, dict) and tree:
        return {
            key: text
            for name, value in tree.items()
            for key, text in leaves(value, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    text = yaml.safe_dump(tree, default_flow_style=True, allow_unicode=True, width=math.inf)
    return {prefix: text.strip().removesuffix("...").strip()}


class _Builder:
    """One run of `build`: the source for messages and the root for nearest keys."""

    def __init__(self, source: ConfigSource, root: type) -> None:
        self._source = source
        self._root = root

    def build(self, annotation: Any, value: Any, key: Key) -> Any:
        """``value`` as ``annotation``, or a `ConfigError` that names ``key``."""
        origin = typing.get_origin(annotation)
        if dataclasses.is_dataclass(annotation):
            return self._dataclass(typing.cast("type", annotation), value, key)
        if origin in (Union, types.UnionType):
            return self._union(annotation, value, key)
        if origin is tuple:
            return self._tuple(annotation, value, key)
        if origin is list and isinstance(value, list):
            (item,) = typing.get_args(annotation)
            return [self.build(item, part, (*key, str(i))) for i, part in enumerate(value)]
        if origin in (dict, collections.abc.Mapping) and isinstance(value, dict):
            item = typing.get_args(annotation)[1]
            return {
                str(name): self.build(item, part, (*key, str(name))) for name, part in value.items()
            }
        accepted, result = _scalar(annotation, value)
        if not accepted:
            raise self._wrong(annotation, value, key)
        return result

    def _dataclass(self, cls: type, value: Any, key: Key) -> Any:
        if value is None:
            value = {}  # "train:" with nothing below it means every default
        if not isinstance(value, dict):
            raise self._wrong(cls, value, key)
        variants = _variants(cls)
        cls = cls if variants is None else self._variant(variants, value, key)
        hints = typing.get_type_hints(cls)
        fields = {item.name: item for item in dataclasses.fields(cls) if item.init}
        unknown = next((name for name in value if name not in fields), None)
        if unknown is not None:
            raise self._unknown((*key, str(unknown)), cls, list(fields), variants)
        for name, item in fields.items():
            has_default = (
                item.default is not dataclasses.MISSING
                or item.default_factory is not dataclasses.MISSING
            )
            # A required section may still be wholly made of defaults; then it need not be said.
            if name not in value and not has_default:
                if not dataclasses.is_dataclass(hints[name]):
                    raise self._missing((*key, name), hints[name])
                value = {**value, name: {}}
        arguments = {name: self.build(hints[name], value[name], (*key, name)) for name in value}
        try:
            return cls(**arguments)
        except ConfigError:
            raise
        except ValueError as error:
            section = ".".join(key)
            where = f"in section '{section}': " if section else ""
            raise ConfigError(f"{self._post_init_place(key, error)}: {where}{error}") from error

    def _variant(self, variants: Variants, value: dict[str, Any], key: Key) -> type:
        """The variant that the section ``value`` asks for."""
        try:
            return variants.find(variants.chosen(value))
        except ValueError as error:
            section = f"in section '{'.'.join(key)}': " if key else ""
            place = self._source.origin((*key, variants.tag))
            raise ConfigError(f"{place}: {section}{error}") from error

    def _post_init_place(self, key: Key, error: ValueError) -> str:
        """The place of the field that the message of a ``__post_init__`` begins with, if any."""
        words = str(error).replace("=", " ").replace(":", " ").split()
        if words:
            named = (*key, *words[0].strip("`'\"").split("."))
            return self._source.origin(named)
        return self._source.origin(key)

    def _union(self, annotation: Any, value: Any, key: Key) -> Any:
        members = typing.get_args(annotation)
        # Exact types first, so that an int stays an int under `float | int`.
        for member in members:
            if isinstance(member, type) and type(value) is member:
                return value
        structured = [
            member
            for member in members
            if (isinstance(value, dict) and _takes_mapping(member))
            or (isinstance(value, list) and typing.get_origin(member) in (tuple, list))
        ]
        if len(structured) == 1:
            return self.build(structured[0], value, key)  # its error says more than ours
        sections = [member for member in structured if dataclasses.is_dataclass(member)]
        if len(sections) > 1:
            # The section that knows most of the keys is the one that is meant.
            return self.build(max(sections, key=lambda one: _keys_known(one, value)), value, key)
        for member in members:
            with contextlib.suppress(ConfigError):
                return self.build(member, value, key)
        raise self._wrong(annotation, value, key)

    def _tuple(self, annotation: Any, value: Any, key: Key) -> Any:
        if not isinstance(value, (list, tuple)):
            raise self._wrong(annotation, value, key)
        items = typing.get_args(annotation)
        if len(items) == 2 and items[1] is Ellipsis:
            items = (items[0],) * len(value)
        if len(items) != len(value):
            raise self._wrong(annotation, value, key)
        return tuple(
            self.build(item, part, (*key, str(i)))
            for i, (item, part) in enumerate(zip(items, value, strict=True))
        )

    def _wrong(self, annotation: Any, value: Any, key: Key) -> ConfigError:
        dotted = ".".join(key) or "the config"
        place, expected = self._source.origin(key), describe(annotation)
        near = difflib.get_close_matches(str(value), _literals(annotation), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        form = _form(annotation)
        if form and isinstance(value, str) and place.startswith("override "):
            hint = f"; write it in quotes, such as '{dotted}={form}'"
        return ConfigError(f"{place}: {dotted}={value!r}: expected {expected}{hint}")

    def _missing(self, key: Key, annotation: Any) -> ConfigError:
        dotted = ".".join(key)
        return ConfigError(
            f"{self._source.origin(key[:-1])}: {dotted} is missing ({describe(annotation)}); add it"
            f" there or give {dotted}=... on the command line"
        )

    def _unknown(
        self, key: Key, cls: type, siblings: list[str], variants: Variants | None
    ) -> ConfigError:
        dotted = ".".join(key)
        if variants is not None:
            owners = [
                name
                for name, other in variants.classes().items()
                if key[-1] in {item.name for item in dataclasses.fields(other)}
            ]
            if owners:
                tag = variants.tag
                return ConfigError(
                    f"{self._source.origin(key)}: {dotted}: {tag} {getattr(cls, tag)} has no such "
                    f"key, {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'}; leave "
                    f"it out or set {'.'.join((*key[:-1], tag))}={owners[0]}"
                )
        near = nearest_key(key, siblings, list(known_keys(self._root)))
        section = f"section '{'.'.join(key[:-1])}'" if key[:-1] else "the top level"
        remedy = (
            f"did you mean {near}?" if near else f"{section} has the keys {', '.join(siblings)}"
        )
        return ConfigError(f"{self._source.origin(key)}: unknown key {dotted}; {remedy}")


def _variants(cls: Any) -> Variants | None:
    """The registry of ``cls`` itself; its variants inherit the attribute and stand for themselves."""
    found = vars(cls).get("variants")
    return found if isinstance(found, Variants) else None


def _keys_known(cls: Any, section: Mapping[str, Any]) -> int:
    """How many keys of a section the dataclass has, or nearly has."""
    names = [item.name for item in dataclasses.fields(cls)]
    return sum(bool(difflib.get_close_matches(str(key), names, n=1)) for key in section)


def _literals(annotation: Any) -> list[str]:
    """The words among which an annotation lets one choose."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is Literal:
        return [option for option in arguments if isinstance(option, str)]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return [word for member in arguments for word in _literals(member)]
    return []


def _form(annotation: Any) -> str | None:
    """How YAML writes a list or a mapping on one line, if the annotation is one."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return next(filter(None, map(_form, arguments)), None)
    if origin in (tuple, list):
        return "[64, 32]" if int in arguments or float in arguments else "[a, b]"
    if origin in (dict, collections.abc.Mapping) or dataclasses.is_dataclass(annotation):
        return "{name: value}"
    return None


def _takes_mapping(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return dataclasses.is_dataclass(annotation) or origin in (dict, collections.abc.Mapping)


def _scalar(annotation: Any, value: Any) -> tuple[bool, Any]:
    """Whether ``value`` is a plain ``annotation``, and it as one."""
    if typing.get_origin(annotation) is Literal:
        options = typing.get_args(annotation)
        return any(option == value and type(option) is type(value) for option in options), value
    if annotation is float:
        return _float(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if annotation is str and isinstance(value, dt.date):
        return True, str(value)  # YAML reads 2026-01-31 as a date
    if annotation in (bool, str, type(None)):
        return isinstance(value, annotation), value
    return annotation is Any, value


def _float(value: Any) -> tuple[bool, Any]:
    # YAML 1.1 reads 1e-3 (without a point) as text; nobody who writes it means text.
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return True, float(value)
    return False, value


_SCALAR_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    type(None): "null",
}


def describe(annotation: Any) -> str:
    """An annotation in words, e.g. ``a list, each item an integer`` or ``'sum' or 'mean'``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    text = _SCALAR_WORDS.get(annotation, str(annotation))
    if origin is Literal:
        text = " or ".join(repr(option) for option in arguments)
    elif origin in (Union, types.UnionType):
        text = " or ".join(describe(member) for member in arguments)
    elif origin is tuple and not (len(arguments) == 2 and arguments[1] is Ellipsis):
        text = f"a list of {len(arguments)}: {', '.join(describe(item) for item in arguments)}"
    elif origin in (tuple, list):
        text = f"a list, each item {describe(arguments[0])}"
    elif origin in (dict, collections.abc.Mapping):
        text = f"a mapping, each value {describe(arguments[1])}"
    elif dataclasses.is_dataclass(annotation):
        names = ", ".join(item.name for item in dataclasses.fields(annotation))
        text = f"a section with the keys {names}"
    return text


def known_keys(cls: Any, prefix: Key = ()) -> Iterator[Key]:
    """Every key of the tree of dataclasses under ``cls``; a mapping's names stand as ``NAME``."""
    variants = _variants(cls) if dataclasses.is_dataclass(cls) else None
    if variants is not None:
        known = (
            key for member in variants.classes().values() for key in known_keys(member, prefix)
        )
        yield from dict.fromkeys(known)
    elif dataclasses.is_dataclass(cls):
        hints = typing.get_type_hints(cls)
        for item in dataclasses.fields(cls):
            key = (*prefix, item.name)
            yield key
            yield from known_keys(hints[item.name], key)
    elif typing.get_origin(cls) in (Union, types.UnionType):
        for member in typing.get_args(cls):
            yield from known_keys(member, prefix)
    elif typing.get_origin(cls) in (dict, collections.abc.Mapping):
        yield from known_keys(typing.get_args(cls)[1], (*prefix, "NAME"))


def nearest_key(key: Key, siblings: list[str], known: list[Key]) -> str | None:
    """The known key that ``key`` was most likely meant to be, dotted, or None.

    A sibling with a similar name is preferred, then the same name in another section, then
    the most similar full key elsewhere; ``key``'s own section is not something to write instead.
    """
    known = [other for other in known if other[:-1] != key[:-1] and other != key[: len(other)]]
    close = difflib.get_close_matches(key[-1], siblings, n=1, cutoff=0.6)
    if close:
        return ".".join((*key[:-1], close[0]))
    elsewhere = [".".join(other) for other in known if other[-1] == key[-1]]
    if elsewhere:
        return max(
            elsewhere,
            key=lambda other: difflib.SequenceMatcher(None, other, ".".join(key)).ratio(),
        )
    full = difflib.get_close_matches(
        ".".join(key), [".".join(other) for other in known], n=1, cutoff=0.6
    )
    return full[0] if full else None
