"""What the fields of the manifest may hold: one description that both readers of the format obey.

A dataclass says its fields' types and ranges by annotations; `rules` makes plain JSON of it, which
the C++ reader is compiled with (`tessera.serving.package.generate`), and `decode` reads by it.

A field that not every version of the format has says in its metadata ``since`` or ``until`` which
version; where it is absent, the object has its default.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, Literal

MAX_INT = (1 << 63) - 1
MAX_NUMBER = 1.7976931348623157e308


@dataclass(frozen=True)
class Between:
    """A number's least and greatest value."""

    least: float
    most: float


@dataclass(frozen=True)
class Hex:
    """A text of so many lower-case hex digits."""

    digits: int


@dataclass(frozen=True)
class OneOf:
    """One of some texts."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class MajorMinor:
    """A text such as ``2.13``: two numbers of one to four digits."""


Count = Annotated[int, Between(0, MAX_INT)]
Positive = Annotated[int, Between(1, MAX_INT)]
Sha256 = Annotated[str, Hex(64)]
NotNegative = Annotated[float, Between(0, MAX_NUMBER)]
Release = Annotated[str, MajorMinor()]

_PLAIN: dict[Any, Any] = {
    str: "text",
    bool: "flag",
    int: {"integer": [-MAX_INT - 1, MAX_INT]},
    float: {"number": [-MAX_NUMBER, MAX_NUMBER]},
}
_UNIONS = (types.UnionType, typing.Union)  # the latter where one of them is Annotated
_RELEASE = re.compile(r"[0-9]{1,4}\.[0-9]{1,4}")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def fields_of(kind: Any, version: int) -> list[Field[Any]]:
    """The fields of a dataclass that ``version`` of the format has, in their order."""
    return [
        one
        for one in fields(kind)
        if one.metadata.get("since", version) <= version <= one.metadata.get("until", version)
    ]


def rules(kind: Any, version: int) -> Any:
    """The annotation ``kind`` as JSON: a word, or one kind of rule with what it needs."""
    found: Any
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        found = _PLAIN[kind]
    elif origin is None:  # a dataclass
        hints = _hints(kind)
        names = [one.name for one in fields_of(kind, version)]
        found = {"object": {name: rules(hints[name], version) for name in names}}
    elif origin in _UNIONS:  # of int and float, or of something and None
        rest = [rules(argument, version) for argument in arguments if argument is not type(None)]
        found = rest[-1]  # a number may be an integer
        if type(None) in arguments:
            found = {"or_null": found}
    elif origin is Literal:
        found = {"one_of": list(arguments)}
    elif origin is tuple:  # only ``tuple[X, ...]`` is used
        found = {"list": rules(arguments[0], version)}
    elif origin is Annotated:
        found = _annotated(*arguments)
    else:
        assert issubclass(origin, Mapping), kind
        found = {"map": rules(arguments[1], version)}
    return found


def _annotated(kind: Any, bound: Any) -> Any:
    if isinstance(bound, Hex):
        return {"hex": bound.digits}
    if isinstance(bound, OneOf):
        return {"one_of": list(bound.words)}
    if isinstance(bound, MajorMinor):
        return "release"
    assert isinstance(bound, Between), bound
    return {"integer" if kind is int else "number": [bound.least, bound.most]}


def decode(kind: Any, data: Any, where: str, version: int) -> Any:
    """``data`` as the annotation ``kind``.

    Args:
        kind: what `rules` takes.
        data: what `json.loads` gives.
        where: names the value in errors.
        version: the format's, which decides what fields there are.

    Raises:
        ValueError: a key is missing or unknown, a value of the wrong type or out of its range.
    """
    found: Any
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str:
        found = _text(_expect(data, str, where), where)
    elif kind is bool:
        found = _expect(data, bool, where)
    elif kind is int or kind is float:  # hashing what `typing` makes takes longer than the rest
        found = _decode_bounded(kind, Between(*next(iter(_PLAIN[kind].values()))), data, where)
    elif origin is None:
        found = _decode_fields(kind, data, where, version)
    elif origin is Literal:
        if not isinstance(data, str) or data not in arguments:
            raise ValueError(f"{where}: expected one of {', '.join(arguments)}")
        found = data
    elif origin in _UNIONS:
        found = _decode_union(arguments, data, where, version)
    elif origin is tuple:
        items = _expect(data, list, where)
        found = tuple(
            decode(arguments[0], item, f"{where}[{i}]", version) for i, item in enumerate(items)
        )
    elif origin is Annotated:
        found = _decode_bounded(arguments[0], arguments[1], data, where)
    else:
        found = {
            _text(key, f"{where}, a key"): decode(arguments[1], item, f"{where}.{key}", version)
            for key, item in _expect(data, dict, where).items()
        }
    return found


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _field_names(kind: Any, version: int) -> tuple[str, ...]:
    return tuple(one.name for one in fields_of(kind, version))


def _decode_fields(kind: Any, data: Any, where: str, version: int) -> Any:
    entries = _expect(data, dict, where)
    hints = _hints(kind)
    names = _field_names(kind, version)
    for name in names:
        if name not in entries:
            raise ValueError(f"{where}: missing key {_quoted(name)}")
    for name in entries:
        if name not in names:
            raise ValueError(f"{where}: unknown key {_quoted(name)}")
    found = {name: decode(hints[name], data[name], f"{where}.{name}", version) for name in names}
    return kind(**found)


def _decode_union(arguments: tuple[Any, ...], data: Any, where: str, version: int) -> Any:
    if data is None and type(None) in arguments:
        return None
    if int in arguments and type(data) is int:
        return data  # of 64 bits, as it was read
    rest = [argument for argument in arguments if argument is not type(None)][-1]
    return decode(rest, data, where, version)


def _decode_bounded(kind: Any, bound: Any, data: Any, where: str) -> Any:
    if kind is str:
        text = _expect(data, str, where)
        if isinstance(bound, OneOf):
            if text not in bound.words:
                raise ValueError(f"{where}: expected one of {', '.join(bound.words)}")
        elif isinstance(bound, Hex):
            if not re.fullmatch(rf"[0-9a-f]{{{bound.digits}}}", text):
                raise ValueError(f"{where}: expected {bound.digits} lower-case hex digits")
        elif not _RELEASE.fullmatch(text):
            raise ValueError(f"{where}: expected a release such as 2.13")
        return text
    # `type() is`, so that true is not taken for a number.
    if type(data) is not int and (kind is int or type(data) is not float):
        raise ValueError(f"{where}: expected {_names(kind)}, found {_names(type(data))}")
    if not bound.least <= data <= bound.most:
        raise ValueError(f"{where}: is out of its range, {bound.least} to {bound.most}")
    return kind(data)


def _expect(data: Any, kind: Any, where: str) -> Any:
    if type(data) is not kind:
        raise ValueError(f"{where}: expected {_names(kind)}, found {_names(type(data))}")
    return data


def _text(text: str, where: str) -> str:
    if _CONTROL.search(text):
        raise ValueError(f"{where}: has a letter that cannot be printed")
    return text


def is_printable(text: str) -> bool:
    """Whether a manifest may hold the text."""
    return _CONTROL.search(text) is None


def _quoted(name: str) -> str:
    return f"'{_CONTROL.sub('?', name)}'"


def _names(kind: type) -> str:
    return {
        str: "a text",
        int: "an integer",
        float: "a number",
        bool: "true or false",
        list: "a list",
        dict: "an object",
        type(None): "null",
    }[kind]
