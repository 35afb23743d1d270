"""How large the numbers of a graph become on a sample of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

SAMPLES = "calibration"
"""The key, in a graph module's ``meta``, of the inputs to measure with: a list of the graph's arguments."""


class _Largest(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, wanted: frozenset[fx.Node]) -> None:
        super().__init__(module)
        self.wanted = wanted
        self.largest = dict.fromkeys(wanted, 0.0)

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n in self.wanted:
            assert isinstance(found, Tensor)
            # An input may hold NaN on purpose, and an overflow says nothing of the others.
            sizes = found.float().abs().nan_to_num(0.0, posinf=0.0)
            self.largest[n] = max(self.largest[n], float(sizes.max()) if sizes.numel() else 0.0)
        return found


def largest_magnitudes(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    """The largest magnitude that each node gives on the inputs of the module's ``meta[SAMPLES]``.

    Finite numbers alone count.  Where a module has no such inputs it is a `KeyError`.
    """
    measured = _Largest(module, frozenset(nodes))
    with torch.inference_mode():
        for arguments in _samples(module):
            measured.run(*arguments)
    return measured.largest


def _samples(module: fx.GraphModule) -> Iterator[tuple[Tensor, ...]]:
    yield from module.meta[SAMPLES]
