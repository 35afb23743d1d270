"""`collect`: the sections of a config and their keys, from a tree of dataclasses.

A dataclass with variants (see `tessera.training.variants`) gives a section with what all of them
have, and one for each with what it has besides.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union

import yaml

from tessera.training.config_reference.docstrings import (
    FieldText,
    field_texts,
    summary,
    variant_summary,
)
from tessera.training.config_source import Key
from tessera.training.trackers.tracker import trackers_by_name
from tessera.training.transforms.transform import Transform, transforms_by_name
from tessera.training.typed_config import to_plain
from tessera.training.variants import Variants

NAME = "NAME"
"""What stands in a key for the names that a mapping holds."""


@dataclass(frozen=True, kw_only=True)
class KeyHelp:
    """One key.

    Attributes:
        key: its parts; `NAME` stands for any name.
        type: in words.
        default: as YAML; None: it must be given.
        unit: what its number counts, if its docstring says so.
        meaning: a sentence or more.
        choices: the words that it can be; empty where they are not few.
    """

    key: Key
    type: str
    default: str | None
    unit: str | None
    meaning: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Section:
    """The keys of one dataclass.

    Attributes:
        key: where it stands; empty: at the top.
        variant: tag and name of the variant whose own keys these are; None: it is not one.
        summary: paragraphs about it.
        keys: what it holds, sections excepted.
    """

    key: Key
    variant: tuple[str, str] | None = None
    summary: str
    keys: tuple[KeyHelp, ...]

    @property
    def title(self) -> str:
        """For readers: ``model``, or ``model, arch: din``."""
        dotted = ".".join(self.key)
        return dotted if self.variant is None else f"{dotted}, {': '.join(self.variant)}"


def collect(root: type) -> list[Section]:
    """Every section below the dataclass ``root``, in the order of its fields."""
    hints = typing.get_type_hints(root)
    sections = [
        section
        for item in dataclasses.fields(root)
        for section in _sections(hints[item.name], (item.name,))
    ]
    places: dict[str, str] = {}
    for _, cls, key in _dataclasses(root, ()):
        places.setdefault(cls.__name__, ".".join(key))
    return [_with_places(section, places) for section in sections]


def _sections(annotation: Any, key: Key) -> Iterator[Section]:
    """The sections of what an annotation holds."""
    for part, below in _dataclass_parts(annotation, key):
        yield from _sections_of(part, below)


def _sections_of(cls: type, key: Key) -> Iterator[Section]:
    variants = vars(cls).get("variants")
    if not isinstance(variants, Variants):
        yield Section(key=key, summary=summary(cls), keys=tuple(_keys(cls, key)))
        yield from _nested(cls, key, without=frozenset())
        return
    shared = tuple(_keys(cls, key, variants))
    first = summary(cls).partition("\n\n")[0]  # what follows is about its use in Python
    yield Section(key=key, summary=first, keys=shared)
    inherited = frozenset(item.name for item in dataclasses.fields(cls))
    yield from _nested(cls, key, without=frozenset())
    for name, variant in sorted(variants.classes().items()):
        own = tuple(
            found
            for found in _keys(variant, key)
            if found.key[-1] != variants.tag and found not in shared
        )
        yield Section(
            key=key, variant=(variants.tag, name), summary=variant_summary(variant), keys=own
        )
        yield from _nested(variant, key, without=inherited)


def _nested(cls: type, key: Key, *, without: frozenset[str]) -> Iterator[Section]:
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if item.name in without:
            continue
        yield from _sections(hints[item.name], (*key, item.name))
        if item.name == "transform":
            for takes in ("dense", "ids"):
                for name, transform in transforms_by_name(takes).items():
                    yield _transform(name, transform, (*key, item.name))
        if item.name == "trackers":
            for name, tracker in trackers_by_name().items():
                below = (*key, item.name, name)
                yield Section(
                    key=below, summary=summary(tracker), keys=tuple(_keys(tracker, below))
                )


def _transform(name: str, transform: type[Transform], key: Key) -> Section:
    words = {"dense": "For dense columns.", "ids": "For columns of ids."}
    about = f"{words[transform.takes]} {summary(transform)}"
    if transform.main:
        about += f" `{name}: VALUE` is short for `{name}: {{{transform.main}: VALUE}}`."
    return Section(key=(*key, name), summary=about, keys=tuple(_keys(transform, (*key, name))))


def _keys(cls: type, key: Key, variants: Variants | None = None) -> Iterator[KeyHelp]:
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            continue  # a section of its own
        text = texts.get(item.name, FieldText(meaning=""))
        is_tag = variants is not None and item.name == variants.tag
        yield KeyHelp(
            key=(*key, item.name),
            type="text" if is_tag else type_words(hint),
            default=_default(item),
            unit=text.unit,
            meaning=text.meaning,
            choices=tuple(sorted(variants.classes())) if is_tag and variants else choices(hint),
        )


def _default(item: dataclasses.Field[Any]) -> str | None:
    if item.default is not dataclasses.MISSING:
        value = item.default
    elif item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    else:
        return None
    text = yaml.safe_dump(to_plain(value), default_flow_style=True, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def choices(annotation: Any) -> tuple[str, ...]:
    """The words of every ``Literal`` in an annotation, as YAML."""
    if typing.get_origin(annotation) is Literal:
        return tuple(str(option) for option in typing.get_args(annotation))
    within = (c for member in typing.get_args(annotation) for c in choices(member))
    return tuple(dict.fromkeys(within))


_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    type(None): "null",
    Any: "anything",
}


def type_words(annotation: Any) -> str:
    """An annotation in a few words, such as ``integer or null`` or ``list of numbers``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    words = _WORDS.get(annotation, str(annotation))
    if origin is Literal:
        words = "a choice"
    elif _is_union(annotation):
        words = " or ".join(dict.fromkeys(type_words(member) for member in arguments))
    elif origin is tuple and arguments[-1] is not Ellipsis:
        words = f"[{', '.join(type_words(item) for item in arguments)}]"
    elif origin in (tuple, list):
        words = f"list, each {type_words(arguments[0])}"
    elif origin in (dict, collections.abc.Mapping):
        words = f"mapping {NAME}: {type_words(arguments[1])}"
    elif dataclasses.is_dataclass(annotation):
        words = "section"
    return words


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _dataclass_parts(annotation: Any, key: Key) -> Iterator[tuple[type, Key]]:
    """The dataclasses within an annotation, and the keys at which their fields stand."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        yield typing.cast("type", annotation), key
    elif _is_union(annotation):
        for member in arguments:
            yield from _dataclass_parts(member, key)
    elif origin in (dict, collections.abc.Mapping):
        yield from _dataclass_parts(arguments[1], (*key, NAME))
    elif origin in (tuple, list):
        yield from _dataclass_parts(arguments[0], (*key, NAME))


def _dataclasses(cls: type, key: Key) -> Iterator[tuple[None, type, Key]]:
    """Every dataclass at and below ``cls`` with its key."""
    if key:
        yield None, cls, key
    variants = vars(cls).get("variants")
    members = [cls, *variants.classes().values()] if isinstance(variants, Variants) else [cls]
    for member in members:
        hints = typing.get_type_hints(member)
        for item in dataclasses.fields(member):
            for part, below in _dataclass_parts(hints[item.name], (*key, item.name)):
                yield from _dataclasses(part, below)


def _with_places(section: Section, places: dict[str, str]) -> Section:
    """The section with the names of dataclasses in its texts replaced by where they stand."""
    names = re.compile(rf"`({'|'.join(sorted(places, key=len, reverse=True))})`")

    def replaced(text: str) -> str:
        return names.sub(lambda match: f"`{places[match[1]]}`", text)

    keys = tuple(dataclasses.replace(key, meaning=replaced(key.meaning)) for key in section.keys)
    return dataclasses.replace(section, summary=replaced(section.summary), keys=keys)
