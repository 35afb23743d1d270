"""Named passes over the traced graph, chosen by what a package is for.

A pass is one `Pass` that a file registers; every file of this folder is loaded when passes are first
asked for.  A pass of a user's own is registered in the same way by the file that holds the module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from tessera.serving.packaging import passes as folder


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a package is for.

    Attributes:
        backend: whose operators it calls, a name of ``lookups.backends.BACKENDS``.
        device: ``cpu`` or ``cuda``.
        dense_dtype: how the dense layers' weights are stored, ``fp32`` or ``bf16``.
    """

    backend: str
    device: str
    dense_dtype: str


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One change of the traced graph that keeps its answers.

    Attributes:
        name: what it does, in lower case with underscores.
        order: passes run in ascending order of this number, and of their names where it is equal.
        applies: whether it is for a target.
        run: changes the graph in place and returns by how many bytes the weights are smaller than
            before.  Every node of the traced graph has ``meta["tensor"]``, a `tensors.Seen`, where
            it gives a tensor.
    """

    name: str
    order: int
    applies: Callable[[Target], bool]
    run: Callable[[fx.GraphModule, Target], int]


_PASSES: dict[str, Pass] = {}


def register(made: Pass) -> Pass:
    """Add a pass to those that `passes_for` chooses from; returns it.

    Raises:
        ValueError: another pass has its name.
    """
    if _PASSES.setdefault(made.name, made) is not made:
        raise ValueError(f"there are two passes called {made.name!r}; give each its own name")
    return made


def passes_for(target: Target) -> list[Pass]:
    """The passes for a target, in the order in which they run."""
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")
    chosen = [known for known in _PASSES.values() if known.applies(target)]
    return sorted(chosen, key=lambda known: (known.order, known.name))


def run_passes(module: fx.GraphModule, target: Target) -> int:
    """Run every pass for ``target`` over a traced module whose tensors were observed, in place.

    Returns:
        By how many bytes the weights are smaller than in float32.
    """
    return sum(chosen.run(module, target) for chosen in passes_for(target))
