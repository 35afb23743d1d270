"""Named passes over the traced graph, chosen by what a package is for.

A pass is a function under a `Pass`; every file of this folder is loaded when passes are first asked
for.  A pass of a user's own stands in the same way in the file that holds the module.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tessera.serving.packaging import passes as folder


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a package is for: a backend's name, ``cpu`` or ``cuda``, ``fp32``, ``bf16`` or ``fp8``."""

    backend: str
    device: str
    dense_dtype: str


Run = Callable[[fx.GraphModule, Target], int]
_PASSES: dict[str, tuple[Pass, Run]] = {}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A decorator that makes a function one change of the traced graph that keeps its answers.

    The function changes the graph in place, which is recompiled then, and may return by how many
    bytes the weights are smaller than before.  Every node of the traced graph has
    ``meta["tensor"]``, a `tensors.Seen`, where it gives a tensor.

    Attributes:
        name: what it does, in lower case with underscores.
        order: passes run in ascending order of this number, and of their names where it is equal.
        backend, device: of the targets that it is for; None: of any.
        dense_dtype: the same, or several.
    """

    name: str
    order: int
    backend: str | None = None
    device: str | None = None
    dense_dtype: str | tuple[str, ...] | None = None

    def __call__(self, change: Callable[[fx.GraphModule, Target], int | None]) -> Run:
        """Register the function; a `ValueError` where another pass has the name."""

        @functools.wraps(change)
        def run(module: fx.GraphModule, target: Target) -> int:
            saved = change(module, target)
            module.recompile()
            return saved or 0

        if self.name in _PASSES:
            raise ValueError(f"there are two passes called {self.name!r}; give each its own name")
        _PASSES[self.name] = self, run
        return run

    def applies(self, target: Target) -> bool:
        """Whether it is for ``target``."""

        def is_for(wanted: str | tuple[str, ...] | None, value: str) -> bool:
            return wanted in {None, value} or (isinstance(wanted, tuple) and value in wanted)

        return all(is_for(getattr(self, what), value) for what, value in vars(target).items())


def passes_for(target: Target) -> list[Pass]:
    """The passes for a target, in the order in which they run."""
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
    chosen = [known for known, _ in _PASSES.values() if known.applies(target)]
    return sorted(chosen, key=lambda known: (known.order, known.name))


def run_passes(module: fx.GraphModule, target: Target) -> int:
    """Run every pass for ``target`` over a traced module whose tensors were observed, in place.

    Returns by how many bytes the weights are smaller than in float32.
    """
    return sum(_PASSES[chosen.name][1](module, target) for chosen in passes_for(target))
