"""YAML text to plain values in bounded time and memory, whatever the text is.

PyYAML follows every alias, nests as deep as Python's stack goes, and lets the exceptions of ``int`` and
``datetime`` through.  Here each of these ends in a `yaml.YAMLError` that says where.
"""

from __future__ import annotations

from typing import Any

import yaml

MAX_DEPTH = 100
MAX_VALUES = 1_000_000
"""How many values a text may stand for, each alias counted as all that it repeats."""

_INT64 = range(-(1 << 63), 1 << 63)
_SHOWN_LETTERS = 40


def bounded_node(text: str, *, aliases: bool = True) -> yaml.Node | None:
    """The root of the one document in ``text``; None where it is empty.

    Args:
        text: YAML.
        aliases: whether it may have some.

    Raises:
        yaml.YAMLError: this is not YAML, is nested more than `MAX_DEPTH` deep, has an alias that
            contains itself or must not be there, or stands for more than `MAX_VALUES` values.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise yaml.YAMLError(f"it is nested more than {MAX_DEPTH} deep") from error
    if node is not None:
        _Counter(aliases=aliases).count(node, 0)
    return node


def plain_value(node: yaml.Node) -> Any:
    """The mappings, lists and scalars that ``node`` of `bounded_node` stands for.

    Raises:
        yaml.YAMLError: a scalar is not of the type that it is written as, an integer has more
            than 64 bits, or a text cannot be written as UTF-8.
    """
    return _Constructor().construct_document(node)


class _Counter:
    """Counts the values below a node, each node once however often it is an alias."""

    def __init__(self, *, aliases: bool) -> None:
        self._aliases = aliases
        self._counts: dict[int, int | None] = {}  # None: its children are being counted

    def count(self, node: yaml.Node, depth: int) -> int:
        if id(node) in self._counts:
            if not self._aliases:
                raise _marked(node, "it is used again by an alias; write it out instead")
            known = self._counts[id(node)]
            if known is None:
                raise _marked(node, "an alias refers to what contains it")
            return known
        if depth > MAX_DEPTH:
            raise _marked(node, f"it is nested more than {MAX_DEPTH} deep")
        self._counts[id(node)] = None
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        total = 1 + sum(self.count(child, depth + 1) for child in children)
        if total > MAX_VALUES:
            raise _marked(node, f"its aliases stand for more than {MAX_VALUES} values")
        self._counts[id(node)] = total
        return total


class _Constructor(yaml.constructor.SafeConstructor):
    """Refuses what Python's own constructors refuse, in YAML's words."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's signature
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        kind = node.tag.rpartition(":")[2]
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()
        except (ArithmeticError, AttributeError, LookupError, ValueError) as error:
            raise _marked(node, f"{_shown(node)} cannot be read as {kind}") from error
        if isinstance(value, int) and value not in _INT64:
            raise _marked(node, f"{_shown(node)} does not fit into 64 bits")
        return value


def _shown(node: yaml.ScalarNode) -> str:
    text = node.value
    if len(text) > _SHOWN_LETTERS:
        return f"a value of {len(text)} letters that begins with {text[:_SHOWN_LETTERS]!r}"
    return repr(text)


def _marked(node: yaml.Node, reason: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
