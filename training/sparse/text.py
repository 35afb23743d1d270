"""How the sparse types print: every bag by its key."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

from torch import Tensor

from tessera.training.sparse.checks import is_traced


class _Bags(Protocol):
    def values(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def lengths_or_none(self) -> Tensor | None: ...
    def offsets_or_none(self) -> Tensor | None: ...
    def offsets(self) -> Tensor: ...


class _KeyedBags(_Bags, Protocol):
    def keys(self) -> list[str]: ...
    def to_dict(self) -> Mapping[str, _Bags]: ...


class _Columns(Protocol):
    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def to_dict(self) -> Mapping[str, Tensor]: ...


def _bags(source: Tensor, offsets: Tensor) -> str:
    bounds: list[int] = offsets.tolist()
    bags = (str(source[start:stop].tolist()) for start, stop in pairwise(bounds))
    return f"[{', '.join(bags)}]"


def _lines(name: str, lines: list[str]) -> str:
    if not lines:
        return f"{name}()\n"
    return "\n".join([f"{name}({{", ",\n".join(f"    {line}" for line in lines), "})", ""])


def _with_weights(jagged: _Bags) -> list[str]:
    lines = [f'"values": {_bags(jagged.values(), jagged.offsets())}']
    if (weights := jagged.weights_or_none()) is not None:
        lines.append(f'"weights": {_bags(weights, jagged.offsets())}')
    return lines


def _jagged_text(jagged: _Bags) -> str:
    """The bags of one feature, as nested lists."""
    if is_traced(jagged.values(), jagged.lengths_or_none(), jagged.offsets_or_none()):
        return "JaggedTensor(traced)"
    if jagged.weights_or_none() is None:
        return _lines("JaggedTensor", [_bags(jagged.values(), jagged.offsets())])
    return _lines("JaggedTensor", _with_weights(jagged))


def _keyed_jagged_text(keyed: _KeyedBags) -> str:
    """The bags of every feature, as nested lists."""
    if is_traced(keyed.values(), keyed.lengths_or_none(), keyed.offsets_or_none()):
        return f"KeyedJaggedTensor({keyed.keys()}, traced)"
    lines = []
    for key, jagged in keyed.to_dict().items():
        if jagged.weights_or_none() is None:
            lines.append(f'"{key}": {_bags(jagged.values(), jagged.offsets())}')
        else:
            inner = ",\n".join(f"        {line}" for line in _with_weights(jagged))
            lines.append(f'"{key}": {{\n{inner}\n    }}')
    return _lines("KeyedJaggedTensor", lines)


def _keyed_text(keyed: _Columns) -> str:
    """The columns of every key, as nested lists."""
    if is_traced(keyed.values()):
        return f"KeyedTensor({keyed.keys()}, traced)"
    columns = keyed.to_dict().items()
    return _lines("KeyedTensor", [f'"{key}": {tensor.tolist()}' for key, tensor in columns])


def text_of(sparse: Any) -> str:
    """How ``sparse``, one of the three types, prints."""
    write: Any = {
        "JaggedTensor": _jagged_text,
        "KeyedJaggedTensor": _keyed_jagged_text,
        "KeyedTensor": _keyed_text,
    }[type(sparse).__name__]
    text: str = write(sparse)
    return text
