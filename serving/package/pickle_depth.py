"""How deeply the values of a pickle lie in one another, found without making any of them.

torch gives a value back by a recursion as deep as the value, so a pickle of 400 KB whose tuples lie in
one another 200,000 times ends the process.  Counting the opcodes bounds what the values take.

A container that a pickle names again must be whole by then, as it is in all that torch writes; what is
filled after it was named is refused, since its depth would no longer be what was counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_OPCODES = 1 << 19
"""Opcodes of one pickle: what describes some 20,000 tensors."""

DICT_OPCODES = 16
"""As how many opcodes one that makes a dictionary counts: torch's takes some 450 bytes, any other value at most 110."""

MAX_DEPTH = 1000
"""Values within values; a module within modules takes two."""

_LEAVES = (
    *(
        "EMPTY_TUPLE",
        "EMPTY_LIST",
        "EMPTY_DICT",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
    ),
    *("BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL", "BINSTRING"),
    "SHORT_BINSTRING",
)
_WRAPPED = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "BINPERSID": 1, "REDUCE": 2, "NEWOBJ": 2}
_FILLED = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
_NAMED = -1


class PickleDepth:
    """Follows the opcodes with the depth of every value on the pickle's stack.

    A value that was named again is held as ``-1 - depth``.
    """

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}
        self._opcodes = 0

    def follow(self, name: str, argument: Any) -> None:
        """Take the next opcode.

        Raises:
            ValueError: there are more than `MAX_OPCODES`, a dictionary counted as `DICT_OPCODES`, values lie deeper than `MAX_DEPTH`, or a
                container is filled after it was named again.
            IndexError: it takes more values than there are.
            KeyError: it names what was not numbered.
        """
        self._opcodes += DICT_OPCODES if name == "EMPTY_DICT" else 1
        if self._opcodes > MAX_OPCODES:
            raise ValueError(
                f"it has more than {MAX_OPCODES} opcodes, a dictionary counted as {DICT_OPCODES}"
            )
        _STEPS[name](self, argument)

    def _ignore(self, _argument: Any) -> None:
        """Neither takes nor gives a value."""

    def _leaf(self, _argument: Any) -> None:
        self._stack.append(0)

    def _put(self, argument: Any) -> None:
        self._memo[argument] = _depth(self._stack[-1])

    def _get(self, argument: Any) -> None:
        self._stack.append(_NAMED - self._memo[argument])

    def _duplicate(self, _argument: Any) -> None:
        self._stack.append(_NAMED - _depth(self._stack[-1]))

    def _mark(self, _argument: Any) -> None:
        self._marks.append(len(self._stack))

    def _wrap_to_mark(self, _argument: Any) -> None:
        self._stack.append(self._taken(self._marks.pop()))

    def _fill_to_mark(self, _argument: Any) -> None:
        self._fill(self._taken(self._marks.pop()))

    def _pop_mark(self, _argument: Any) -> None:
        del self._stack[self._marks.pop() :]

    def _pop(self, _argument: Any) -> None:
        if self._marks[-1:] == [len(self._stack)]:
            self._marks.pop()
        else:
            self._stack.pop()

    def wrap(self, count: int) -> None:
        """The ``count`` values on top become one that holds them."""
        self._stack.append(self._taken(len(self._stack) - count))

    def fill(self, count: int) -> None:
        """The ``count`` values on top go into the one below them."""
        self._fill(self._taken(len(self._stack) - count))

    def _taken(self, start: int) -> int:
        """The depth of what holds the values from ``start`` on, which leave the stack."""
        if start < 0 or start > len(self._stack):
            raise IndexError("it takes more values than there are")
        deepest = 1 + max(map(_depth, self._stack[start:]), default=0)
        if deepest > MAX_DEPTH:
            raise ValueError(f"its values lie in one another more than {MAX_DEPTH} times")
        del self._stack[start:]
        return deepest

    def _fill(self, depth: int) -> None:
        if self._stack[-1] < 0:
            raise ValueError("it fills a container that it has named again")
        self._stack[-1] = max(self._stack[-1], depth)


def _depth(value: int) -> int:
    return value if value >= 0 else _NAMED - value


_Step = Callable[[PickleDepth, Any], None]


def _with(step: Callable[[PickleDepth, int], None], count: int) -> _Step:
    """``step`` with ``count`` values, whatever the opcode's argument is."""

    def taken(depth: PickleDepth, _argument: Any) -> None:
        step(depth, count)

    return taken


def _steps() -> dict[str, _Step]:
    own = PickleDepth
    return {
        **dict.fromkeys(("PROTO", "STOP"), own._ignore),  # noqa: SLF001 - the table of its methods
        **dict.fromkeys(_LEAVES, own._leaf),  # noqa: SLF001
        **dict.fromkeys(("BINPUT", "LONG_BINPUT"), own._put),  # noqa: SLF001
        **dict.fromkeys(("BINGET", "LONG_BINGET"), own._get),  # noqa: SLF001
        **dict.fromkeys(("TUPLE", "LIST", "DICT"), own._wrap_to_mark),  # noqa: SLF001
        **dict.fromkeys(("APPENDS", "SETITEMS"), own._fill_to_mark),  # noqa: SLF001
        "DUP": own._duplicate,  # noqa: SLF001
        "MARK": own._mark,  # noqa: SLF001
        "POP_MARK": own._pop_mark,  # noqa: SLF001
        "POP": own._pop,  # noqa: SLF001
        **{name: _with(own.wrap, count) for name, count in _WRAPPED.items()},
        **{name: _with(own.fill, count) for name, count in _FILLED.items()},
    }


_STEPS = _steps()
