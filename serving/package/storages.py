"""The sizes of tensors' storages in the ``data.pkl`` of a TorchScript archive, read and replaced.

torch's pickler writes every tensor as a persistent id of its storage (its element type, the number of
its record below ``data/``, its device, its number of elements) and then offset, sizes and strides.
This finds those numbers among the pickle's opcodes.  Nothing is unpickled: no object is made, and
nothing that the pickle names is looked up.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DATA_RECORD = "data.pkl"
"""The record that this is about."""

_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}
_LARGEST_BININT = (1 << 31) - 1


@dataclass(kw_only=True)
class _Token:
    """One opcode: its name, argument, first byte and the byte behind its last."""

    name: str
    argument: Any
    begin: int
    end: int


@dataclass(kw_only=True)
class _Storage:
    """Where one storage's size stands, and those of the tensors in it.

    Attributes:
        numbers: of the storage itself and of each tensor that is the whole of it.
        plain: whether its elements are bytes and every tensor in it is one-dimensional and the
            whole of it.
    """

    numbers: list[_Token] = field(default_factory=list)
    plain: bool = True


def byte_storages(content: bytes) -> frozenset[str]:
    """The numbers (as text) of the storages that `resized` can change.

    Those of bytes whose tensors are all one-dimensional and the whole storage.

    Args:
        content: ``data.pkl``.

    Raises:
        ValueError: this is not as torch writes it.
    """
    return frozenset(key for key, storage in _storages(content).items() if storage.plain)


def resized(content: bytes, sizes: Mapping[str, int]) -> bytes:
    """``content`` with other sizes for some of its `byte_storages`.

    Args:
        content: ``data.pkl``.
        sizes: the new number of elements, by storage.

    Raises:
        ValueError: this is not as torch writes it.
    """
    storages = _storages(content)
    replaced = [(token, sizes[key]) for key in sizes for token in storages[key].numbers]
    pieces, done = [], 0
    for token, size in sorted(replaced, key=lambda item: item[0].begin):
        pieces += [content[done : token.begin], _pickled(size)]
        done = token.end
    return b"".join([*pieces, content[done:]])


def _storages(content: bytes) -> dict[str, _Storage]:
    try:
        return _find(list(_tokens(content)))
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{DATA_RECORD} is not as torch writes it: {error}") from error


def _tokens(content: bytes) -> Iterator[_Token]:
    before: _Token | None = None
    for opcode, argument, position in pickletools.genops(content):
        assert position is not None
        if before is not None:
            before.end = position
            yield before
        before = _Token(name=opcode.name, argument=argument, begin=position, end=len(content))
    if before is not None:
        yield before


def _find(tokens: list[_Token]) -> dict[str, _Storage]:
    memo: dict[int, _Token | str] = {}
    found: dict[str, _Storage] = {}
    plain: list[_Token] = []  # without the opcodes that number what stands before them
    keys: dict[int, str] = {}  # the storage that begins at a token of ``plain``
    for token in tokens:
        if token.name in _PUTS:
            at = len(plain) - 1
            memo[token.argument] = keys.get(at, plain[at])
            continue
        plain.append(token)
        at = len(plain) - 1
        if token.name == "BINPERSID":
            keys[at] = _new_storage(plain[at - 7 : at], memo, found)
        elif token.name in _GETS:
            known = memo[token.argument]
            if isinstance(known, str):
                keys[at] = known
    for at, key in keys.items():
        _add_tensor(plain[at + 1 : at + 5], found[key])
    return found


def _new_storage(
    before: list[_Token], memo: Mapping[int, _Token | str], found: dict[str, _Storage]
) -> str:
    """Note what a persistent id says: ``("storage", type, key, device, elements)``."""
    mark, word, kind, key, device, elements, end = before
    names = [_value(token, memo) for token in (word, kind, key, device)]
    shaped = [mark.name, end.name] == ["MARK", "TUPLE"] and elements.name in _INTEGERS
    if not shaped or names[0] != "storage" or names[2] in found:
        raise ValueError("a storage is described in another way")
    found[names[2]] = _Storage(numbers=[elements], plain=names[1] == "torch ByteStorage")
    return names[2]


def _value(token: _Token, memo: Mapping[int, _Token | str]) -> str:
    meant = memo[token.argument] if token.name in _GETS else token
    if isinstance(meant, str) or not isinstance(meant.argument, str):
        raise ValueError(f"{token.name} where a text belongs")  # noqa: TRY004 - the file is wrong
    return meant.argument


def _add_tensor(after: list[_Token], storage: _Storage) -> None:
    """Note the tensor behind a storage: offset, then a tuple of sizes."""
    offset, mark, size, end = after
    whole = (
        [offset.name in _INTEGERS, mark.name, size.name in _INTEGERS, end.name]
        == [True, "MARK", True, "TUPLE"]
        and offset.argument == 0
        and size.argument == storage.numbers[0].argument
    )
    storage.plain = storage.plain and whole
    storage.numbers.append(size)


def _pickled(number: int) -> bytes:
    """A size as torch pickles it."""
    if number < 1 << 8:
        return b"K" + struct.pack("<B", number)
    if number < 1 << 16:
        return b"M" + struct.pack("<H", number)
    if number <= _LARGEST_BININT:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)
