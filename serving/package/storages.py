"""The pickles of a TorchScript archive: what they name, and the sizes of the storages in them.

torch's pickler writes every tensor as a persistent id of its storage (its element type, the number of
its record below ``data/``, its device, its number of elements) and then offset, sizes and strides.
This finds those numbers among the pickle's opcodes, in memory that does not grow with what the pickle
would make.  Nothing is unpickled: no object is made, and nothing that the pickle names is looked up.
"""

from __future__ import annotations

import pickletools
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tessera.serving.package.pickle_depth import PickleDepth

DATA_RECORD = "data.pkl"
"""The record of the module's attributes."""

CONSTANTS_RECORD = "constants.pkl"
"""The record of the constants that the source refers to."""

MAX_PICKLE_BYTES = 4 << 20
"""The largest pickle that is read: it describes some 40,000 tensors."""

ELEMENT_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Short": 2,
    "Half": 2,
    "BFloat16": 2,
    "Int": 4,
    "Float": 4,
    "Long": 8,
    "Double": 8,
}
"""Bytes of one element, by the storage's name without ``Storage``."""

_OPCODES = frozenset(
    [
        *("PROTO", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "MARK", "TUPLE", "TUPLE1", "TUPLE2"),
        *("TUPLE3", "LIST", "DICT", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "NONE", "NEWTRUE"),
        *("NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "BINPUT"),
        *("SHORT_BINUNICODE", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "NEWOBJ", "REDUCE"),
        *("BUILD", "BINPERSID", "POP", "POP_MARK", "DUP", "BINSTRING", "SHORT_BINSTRING", "STOP"),
    ]
)
PLAIN_NAMES = frozenset(
    [
        *("torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch device"),
        *("torch.jit._pickle restore_type_tag", "torch.jit._pickle build_tensorlist"),
        *("torch.jit._pickle build_intlist", "torch.jit._pickle build_doublelist"),
        "torch.jit._pickle build_boollist",
    ]
)
"""What a pickle may name beside storages and the archive's own classes: module, space, name."""

_NAMES = PLAIN_NAMES | {f"torch {kind}Storage" for kind in ELEMENT_BYTES}
_OWN_CLASSES, _FOREIGN_CLASSES = "__torch__.", "__torch__.torch.classes."
_TEXTS = {"BINUNICODE", "GLOBAL"}
_MOST_ELEMENTS = 1 << 48
_INTEGERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_PUTS = {"BINPUT", "LONG_BINPUT"}
_GETS = {"BINGET", "LONG_BINGET"}
_LARGEST_BININT = (1 << 31) - 1
_SHOWN_LETTERS = 200
MAX_REMEMBERED = 1 << 17
"""How many texts and storages a pickle may number to refer to them again."""


@dataclass(slots=True, kw_only=True)
class _Token:
    """One opcode: its name, argument, first byte and the byte behind its last."""

    name: str
    argument: Any
    begin: int
    end: int
    storage: str = ""  # the number of the storage that begins here


@dataclass(kw_only=True)
class _Storage:
    """Where one storage's size stands, and those of the tensors in it.

    Attributes:
        kind: the element type, such as ``Float``.
        numbers: of the storage itself and of each tensor that is the whole of it.
        plain: whether its elements are bytes and every tensor in it is one-dimensional and the
            whole of it.
    """

    kind: str
    numbers: list[_Token] = field(default_factory=list)
    plain: bool = True

    @property
    def bytes(self) -> int:
        """The bytes that its record must have."""
        return int(self.numbers[0].argument) * ELEMENT_BYTES[self.kind]


def storage_bytes(content: bytes, record: str = DATA_RECORD) -> dict[str, int]:
    """The bytes of every storage, by its number as text; torch itself does not compare them.

    Args:
        content: a pickle of the archive.
        record: its name, for errors.

    Raises:
        ValueError: this is not as torch writes it, or names something that no package may.
    """
    return {key: storage.bytes for key, storage in _storages(content, record).items()}


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


def _storages(content: bytes, record: str = DATA_RECORD) -> dict[str, _Storage]:
    try:
        return _Finder().find(_tokens(content))
    except (IndexError, KeyError, UnicodeDecodeError, ValueError) as error:
        reason = " ".join(str(error).split())[:_SHOWN_LETTERS]
        raise ValueError(f"{record} is not as torch writes it: {reason}") from error


def _tokens(content: bytes) -> Iterator[_Token]:
    before: _Token | None = None
    depth = PickleDepth()
    for opcode, argument, position in pickletools.genops(content):
        assert position is not None
        if opcode.name not in _OPCODES:
            raise ValueError(f"opcode {opcode.name}")
        if opcode.name == "GLOBAL":
            _check_name(str(argument))
        depth.follow(opcode.name, argument)
        if before is not None:
            before.end = position
            yield before
        before = _Token(name=opcode.name, argument=argument, begin=position, end=len(content))
    if before is not None:
        if before.begin + 1 != len(content):
            raise ValueError("there are bytes behind its end")
        yield before


def _check_name(name: str) -> None:
    """Whether a pickle may name ``module name``: torch's own way of tensors, and the archive's classes."""
    dotted = name.replace(" ", ".")
    own = dotted.startswith(_OWN_CLASSES) and not dotted.startswith(_FOREIGN_CLASSES)
    if name not in _NAMES and not own:
        raise ValueError(f"it names {dotted!r}, which no package may")


class _Finder:
    """Follows the opcodes with what stands around a storage in view, and nothing else.

    `_recent` are the last opcodes without those that number what stands before them, `_memo` the texts
    and storages that were numbered, `_open` the storages whose tensor is not read yet.
    """

    def __init__(self) -> None:
        self._recent: deque[_Token] = deque(maxlen=8)
        self._memo: dict[int, _Token] = {}
        self._open: list[tuple[_Storage, list[_Token]]] = []
        self._found: dict[str, _Storage] = {}

    def find(self, tokens: Iterator[_Token]) -> dict[str, _Storage]:
        for token in tokens:
            if token.name in _PUTS:
                self._remember(token.argument)
                continue
            self._follow(token)
            self._recent.append(token)
            if token.name == "BINPERSID":
                token.storage = self._new_storage(list(self._recent)[:-1])
            elif token.name in _GETS:
                known = self._memo.get(token.argument)
                token.storage = "" if known is None else known.storage
            if token.storage:
                self._open.append((self._found[token.storage], []))
        if self._open:
            raise ValueError("it is cut short")
        return self._found

    def _remember(self, number: int) -> None:
        last = self._recent[-1]
        meant = self._memo.get(last.argument, last) if last.name in _GETS else last
        if meant.storage or meant.name in _TEXTS:
            self._memo[number] = meant
            if len(self._memo) > MAX_REMEMBERED:
                raise ValueError(f"it numbers more than {MAX_REMEMBERED} texts")
        else:
            self._memo.pop(number, None)

    def _follow(self, token: _Token) -> None:
        for storage, after in self._open:
            after.append(token)
            if len(after) == 4:
                _add_tensor(after, storage)
        self._open = [(storage, after) for storage, after in self._open if len(after) < 4]

    def _new_storage(self, before: list[_Token]) -> str:
        """Note what a persistent id says: ``("storage", type, key, device, elements)``."""
        mark, word, kind, key, device, elements, end = before
        names = [
            self._text(word),
            self._text(kind, "GLOBAL"),
            self._text(key),
            self._text(device),
        ]
        shaped = [mark.name, end.name] == ["MARK", "TUPLE"] and elements.name in _INTEGERS
        name = names[1].removeprefix("torch ").removesuffix("Storage")
        known = shaped and name in ELEMENT_BYTES and 0 <= elements.argument <= _MOST_ELEMENTS
        if not known or names[0] != "storage" or names[2] in self._found or not names[2]:
            raise ValueError("a storage is described in another way")
        self._found[names[2]] = _Storage(kind=name, numbers=[elements], plain=name == "Byte")
        return names[2]

    def _text(self, token: _Token, opcode: str = "BINUNICODE") -> str:
        meant = self._memo[token.argument] if token.name in _GETS else token
        if meant.name != opcode:
            raise ValueError(f"{token.name} where a text belongs")
        return str(meant.argument)


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
    if storage.plain:
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
