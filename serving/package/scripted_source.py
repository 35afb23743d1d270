"""What of a package's TorchScript source would run while torch opens the archive, and is it harmless?

Opening compiles the source and runs three things of it: default values of parameters and of classes' fields,
and the method ``__setstate__`` of each object.  Here the first two must be literals, and the third may
only move tensors into attributes and call operators of the list.  Everything else of the source runs in
``forward``, whose graph `tessera.serving.package.operators` looks at.

The source must be laid out as torch prints it (a class at the line's begin, its fields and methods two
spaces in, one statement a line), so that torch's parser and these rules cannot see different programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tessera.serving.package.operators import ALLOWED_OPERATORS

MAX_CODE_BYTES = 16 << 20

_CLASS = re.compile(r"class [\w.]+(\([\w.]+\))?:")
_FUNCTION = re.compile(r"def \w+\((.*)\)( -> [\w.,\[\] ]+)?:")
_SETSTATE = re.compile(
    r"def __setstate__\(self: [\w.]+, state: Tuple\[[\w., \[\]]*\]\) -> NoneType:"
)
_LITERALS = re.compile(r'[\w.,:=\[\]{}" +-]*')
_OPERAND = r"(\(state\)\[\d+\]|[\w.]+)"
_STATEMENT = re.compile(
    rf"((self\.)?\w+ = )({_OPERAND}|(?P<call>[\w.]+)\({_OPERAND}(, {_OPERAND})*\))|return None"
)
_EMPTY_TUPLE = "[()]"  # the type of a tuple without items


class SourceError(ValueError):
    """A source would run more than it may while it is opened; the message says what."""


def check_source(content: bytes, more: Iterable[str] = ()) -> None:
    """Refuse a source that could do anything while torch opens the archive.

    Args:
        content: of one ``code/*.py`` record.
        more: operators that are allowed beside `ALLOWED_OPERATORS`.

    Raises:
        SourceError: see above.
    """
    if len(content) > MAX_CODE_BYTES:
        raise SourceError(f"it has more than {MAX_CODE_BYTES} bytes")
    allowed = ALLOWED_OPERATORS.union(more)
    scope = ""  # of what the deeper lines are: "class", "def" or "setstate"
    in_class = False
    for number, indent, line in _lines(content):
        deep = indent >= (4 if in_class else 2)
        if deep and scope == "setstate":
            _check_statement(number, line, allowed)
        elif deep and scope == "def":
            continue
        elif indent == 0 and _CLASS.fullmatch(line):
            scope, in_class = "class", True
        elif line.startswith("def ") and (indent == 0 or (indent == 2 and in_class)):
            in_class = in_class and indent == 2
            scope = _function(number, line)
        elif indent == 0 or (indent == 2 and in_class):
            in_class = in_class and indent == 2
            scope = ""
            if not _LITERALS.fullmatch(line.replace(_EMPTY_TUPLE, "[]")):
                raise SourceError(f"line {number} computes something where only a literal may be")
        else:
            raise SourceError(f"line {number} is not laid out as torch writes it")


def _function(number: int, line: str) -> str:
    found = _FUNCTION.fullmatch(line)
    if found is None or not _LITERALS.fullmatch(found[1].replace(_EMPTY_TUPLE, "[]")):
        raise SourceError(f"line {number} computes something where only a literal may be")
    if not line.startswith("def __setstate__("):
        return "def"
    if not _SETSTATE.fullmatch(line):
        raise SourceError(f"line {number} defines __setstate__ in a way that packages do not have")
    return "setstate"


def _check_statement(number: int, line: str, allowed: frozenset[str]) -> None:
    found = _STATEMENT.fullmatch(line)
    if found is None:
        raise SourceError(f"line {number} would run while torch opens it and is not plain enough")
    called = found["call"]
    if called is None:
        return
    name = re.sub(r"^torch\.(\w+)$", r"aten::\1", re.sub(r"^ops\.(\w+)\.(\w+)$", r"\1::\2", called))
    if name not in allowed:
        raise SourceError(f"line {number} would call {called} while torch opens it")


def _lines(content: bytes) -> Iterable[tuple[int, int, str]]:
    """Number, indent and text of each statement; brackets join lines, texts are left out."""
    begin, indent, depth = 1, 0, 0
    line: list[str] = []
    for number, physical in enumerate(content.split(b"\n"), start=1):
        if any(not 0x20 <= byte <= 0x7E for byte in physical):
            raise SourceError(f"line {number} has a byte that torch does not write")
        text = physical.decode("ascii")
        bare = _without_texts(number, text)
        if not depth:
            begin, indent, line = number, len(text) - len(text.lstrip(" ")), []
        line.append(bare.strip(" "))
        depth += sum(map(bare.count, "([{")) - sum(map(bare.count, ")]}"))
        if depth < 0:
            raise SourceError(f"line {number} closes a bracket that is not open")
        joined = " ".join(line)
        if not depth and joined:
            yield begin, indent, joined
    if depth:
        raise SourceError("a bracket is not closed")


def _without_texts(number: int, text: str) -> str:
    """``text`` with ``""`` for every literal text."""
    kept: list[str] = []
    at = 0
    while at < len(text):
        letter = text[at]
        if letter in "#\\;@`'":
            raise SourceError(f"line {number} has {letter!r} where torch writes none")
        kept.append(letter)
        at += 1
        if letter != '"':
            continue
        if len(kept) > 1 and (kept[-2].isalnum() or kept[-2] in '_"'):
            raise SourceError(f"line {number} has a text where torch writes none")
        while at < len(text) and text[at] != '"':
            at += 2 if text[at] == "\\" else 1
        if at >= len(text):
            raise SourceError(f"line {number} has a text that does not end")
        kept.append('"')
        at += 1
    return "".join(kept)
