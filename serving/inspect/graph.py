"""A package's graph as a few nodes that a person can read: operators, what they take, their weights.

TorchScript's own graph has a node for every constant, attribute and list; here these are arguments of
the operator that uses them.  What only counts (sizes, flags) is left out, and a branch is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["input", "lookup", "dense", "other", "output"]

_COLLECTIONS = {"prim::ListConstruct", "prim::TupleConstruct"}
_UNPACKING = {"prim::ListUnpack", "prim::TupleUnpack"}
_LOOKUPS = ("lookup", "embedding")
_DENSE = ("linear", "matmul", "mm", "interaction", "attention")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operator (such as ``tessera.lookup``), input or output; ``number`` is its place in `Graph`.

    ``arguments`` are as they are written, in order: ``%3`` for node 3, numbers, names of weights;
    ``weights`` have name, shape and type of each tensor of the model that it uses; ``inputs`` are
    the nodes that it takes something from, each once.
    """

    number: int
    name: str
    kind: Kind
    arguments: tuple[str, ...]
    weights: tuple[str, ...]
    inputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Nodes in the order of execution: each takes from earlier ones only."""

    nodes: tuple[Node, ...]


def read_graph(module: Any, sizes: Mapping[str, int] | None = None) -> Graph:
    """The graph of a `torch.jit.ScriptModule`'s ``forward``, everything that it calls included.

    ``sizes`` are the bytes of tensors that are not in ``module`` as they are in the package.
    """
    return Graph(nodes=tuple(_Reader(module, sizes or {}).read()))


def graph_text(graph: Graph) -> str:
    """One line per node: its number, its call, and the weights that it uses."""
    lines = []
    width = len(str(len(graph.nodes)))
    for node in graph.nodes:
        number = f"%{node.number:<{width}}"
        if node.kind == "input":
            lines.append(f"{number}  input {node.name}")
        elif node.kind == "output":
            lines.append(f"{number}  output {node.name} = {', '.join(node.arguments)}")
        else:
            lines.append(f"{number}  {node.name}({', '.join(node.arguments)})")
            lines += [f"{'':>{width + 1}}      {weight}" for weight in node.weights]
    return "\n".join(lines)


@dataclass(kw_only=True)
class _Value:
    """What one value of TorchScript's graph is here.

    ``text`` is how an argument of it is written, ``inputs`` and ``weights`` are the nodes and the
    model's tensors behind it, ``path`` is an attribute's, from the module down, and ``entries`` are a
    dictionary's.
    """

    text: str
    inputs: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    path: str | None = None
    entries: tuple[tuple[str, _Value], ...] = ()


class _Reader:
    def __init__(self, module: Any, sizes: Mapping[str, int]) -> None:
        self._module = module
        self._sizes = sizes
        self._values: dict[str, _Value] = {}
        self._nodes: list[Node] = []

    def read(self) -> list[Node]:
        graph = self._module.inlined_graph
        this, *inputs = graph.inputs()
        self._values[this.debugName()] = _Value(text="self", path="")
        for value in inputs:
            name = value.debugName().split(".")[0]
            self._values[value.debugName()] = self._add(name, "input", [])
        for node in graph.nodes():
            self._read(node)
        for output in graph.outputs():
            found = self._of(output)
            for name, entry in found.entries or (("output", found),):
                self._add(name.strip("'"), "output", [entry])
        return self._nodes

    def _of(self, value: Any) -> _Value:
        return self._values.get(value.debugName(), _Value(text="?"))

    def _add(self, name: str, kind: Kind, arguments: list[_Value]) -> _Value:
        number = len(self._nodes)
        node = Node(
            number=number,
            name=name,
            kind=kind,
            arguments=tuple(argument.text for argument in arguments),
            weights=tuple(dict.fromkeys(w for argument in arguments for w in argument.weights)),
            inputs=tuple(sorted({n for argument in arguments for n in argument.inputs})),
        )
        self._nodes.append(node)
        return _Value(text=f"%{number}", inputs=(number,))

    def _read(self, node: Any) -> None:
        kind = node.kind()
        outputs = list(node.outputs())
        arguments = [self._of(value) for value in node.inputs()]
        if kind == "prim::Constant":
            found = _Value(text=_constant(outputs[0]))
        elif kind == "prim::GetAttr":
            found = self._attribute(arguments[0].path, node.s("name"))
        elif kind in _COLLECTIONS:
            found = _together(arguments)
        elif kind == "prim::DictConstruct":
            pairs = zip(arguments[::2], arguments[1::2], strict=True)
            found = _together(arguments)
            found.entries = tuple((key.text, value) for key, value in pairs)
        elif kind in _UNPACKING:
            found = arguments[0]
        elif not any(_holds_tensor(value.type()) for value in outputs):
            found = _Value(text="_")  # a size or a flag
        else:
            blocks = [self._block(block) for block in node.blocks()]
            name = "/".join(dict.fromkeys(op for ops, _ in blocks for op in ops))
            name = f"if ({name})" if blocks else _short(kind)
            free = [value for _, used in blocks for value in used]
            arguments = [*arguments, *free] if not blocks else _distinct(free)
            found = self._add(name, _kind(name), arguments)
        for value in outputs:
            self._values[value.debugName()] = found

    def _block(self, block: Any) -> tuple[list[str], list[_Value]]:
        """The operators of a branch, and what it takes from outside."""
        operators, used = [], []
        inside = {value.debugName() for node in block.nodes() for value in node.outputs()}
        for node in [*block.nodes(), block.returnNode()]:
            used += [self._of(value) for value in node.inputs() if value.debugName() not in inside]
            if any(_holds_tensor(value.type()) for value in node.outputs()):
                operators.append(_short(node.kind()))
            for inner in node.blocks():
                more, taken = self._block(inner)
                operators += more
                used += [value for value in taken if value.text != "?"]
        return operators, [value for value in used if value.inputs or value.weights]

    def _attribute(self, parent: str | None, name: str) -> _Value:
        path = f"{parent}.{name}" if parent else name
        value = self._module
        for part in path.split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return _Value(text=path, path=path)
        shape = " x ".join(str(size) for size in value.shape)
        if path in self._sizes:
            shape = str(self._sizes[path])
        kind = str(value.dtype).removeprefix("torch.")
        return _Value(text=path, path=path, weights=(f"{path} [{shape}] {kind}",))


def _constant(value: Any) -> str:
    content = value.toIValue()
    if isinstance(content, torch.Tensor):
        return f"tensor{list(content.shape)}"
    return repr(content)


def _together(values: list[_Value]) -> _Value:
    return _Value(
        text=f"[{', '.join(value.text for value in values)}]",
        inputs=tuple(n for value in values for n in value.inputs),
        weights=tuple(w for value in values for w in value.weights),
    )


def _distinct(values: list[_Value]) -> list[_Value]:
    return list({value.text: value for value in values}.values())


def _holds_tensor(kind: Any) -> bool:
    return "Tensor" in kind.str()


def _short(kind: str) -> str:
    return kind.removeprefix("aten::").removeprefix("prim::").replace("::", ".").strip("_")


def _kind(operator: str) -> Kind:
    name = operator.rpartition(".")[2]
    if any(word in name for word in _LOOKUPS):
        return "lookup"
    return "dense" if any(word in name for word in _DENSE) else "other"


def edges(graph: Graph) -> Iterator[tuple[int, int]]:
    """Every pair of a node and one that takes something from it."""
    for node in graph.nodes:
        for source in node.inputs:
            yield source, node.number
