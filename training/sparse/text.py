"""How the sparse types print: every bag by its key, as nested lists."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from tessera.training.sparse.checks import is_traced

# The types themselves import this module, so they have no names here.


def _bags(source: Tensor, offsets: Tensor) -> str:
    bounds: list[int] = offsets.tolist()
    bags = (str(source[start:stop].tolist()) for start, stop in pairwise(bounds))
    return f"[{', '.join(bags)}]"


def _lines_of(jagged: Any) -> list[str]:
    """The bags; where they have weights a line of values and one of weights."""
    values = _bags(jagged.values(), jagged.offsets())
    weights = jagged.weights_or_none()
    if weights is None:
        return [values]
    return [f'"values": {values}', f'"weights": {_bags(weights, jagged.offsets())}']


def _feature(key: str, jagged: Any) -> str:
    lines = _lines_of(jagged)
    if len(lines) == 1:
        return f'"{key}": {lines[0]}'
    inner = ",\n".join(f"        {line}" for line in lines)
    return f'"{key}": {{\n{inner}\n    }}'


def text_of(sparse: Any) -> str:
    """How ``sparse``, one of the three types, prints."""
    kind = type(sparse).__name__
    if is_traced(*vars(sparse).values()):
        keys = "" if kind == "JaggedTensor" else f"{sparse.keys()}, "
        return f"{kind}({keys}traced)"
    if kind == "JaggedTensor":
        lines = _lines_of(sparse)
    elif kind == "KeyedJaggedTensor":
        lines = [_feature(key, jagged) for key, jagged in sparse.to_dict().items()]
    else:
        lines = [f'"{key}": {columns.tolist()}' for key, columns in sparse.to_dict().items()]
    if not lines:
        return f"{kind}()\n"
    return "\n".join([f"{kind}({{", ",\n".join(f"    {line}" for line in lines), "})", ""])
