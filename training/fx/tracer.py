"""A `torch.fx` tracer that knows the library's types, and leaves named modules whole.

The sparse types build themselves in a traced graph (see
`tessera.training.sparse.outside_script`); what torch's own tracer lacks is below.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.sparse.wrapped_steps import wrapped_functions_take_sparse_types

_tracing = False


def is_fx_tracing() -> bool:
    """Whether a `Tracer` of this module is at work."""
    return _tracing


class Tracer(fx.Tracer):
    """Records what a model does to its inputs.

    Args:
        leaf_modules: names of classes whose modules are one step of the graph each.

    Beyond torch's own tracer: a function marked with ``torch.fx.wrap`` is one step also where it is
    given a sparse type that the model built; an awaitable is waited for where it leaves the model, and the
    argument types of a model with postponed annotations are types again, as
    ``torch.jit.script`` needs them.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or [])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether ``m`` is one step of the graph."""
        return type(m).__name__ in self._leaf_modules or super().is_leaf_module(
            m, module_qualified_name
        )

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        """The graph of ``root``; arguments in ``concrete_args`` are fixed to their values."""
        global _tracing  # noqa: PLW0603 - asked by `is_fx_tracing` from inside the traced code
        before, _tracing = _tracing, True
        try:
            with wrapped_functions_take_sparse_types():
                graph = super().trace(root, concrete_args)
        finally:
            _tracing = before
        _resolve_types(graph, root.forward if isinstance(root, nn.Module) else root)
        return graph

    def path_of_module(self, mod: nn.Module) -> str:
        """The module's name in the model; its type's name where it is traced but not registered."""
        try:
            return super().path_of_module(mod)
        except NameError:
            if self.is_leaf_module(mod, ""):
                raise
            return type(mod).__name__

    def create_arg(self, a: Any) -> Any:
        """``a`` as an argument of a step."""
        if isinstance(a, Awaitable) and not isinstance(a, fx.Proxy):
            a = a.wait()
        return super().create_arg(a)


def _resolve_types(graph: fx.Graph, function: Callable[..., Any]) -> None:
    """Replace the names of types by the types, for the code that the graph becomes."""
    named = [node for node in graph.nodes if isinstance(node.type, str)]
    if not named:
        return
    try:
        types = typing.get_type_hints(function)
    except (NameError, TypeError):
        # Names that only a type checker knows: the graph is as good without them.
        types = {}
    for node in named:
        name = "return" if node.op == "output" else str(node.target).lstrip("*")
        node.type = types.get(name)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> fx.GraphModule:
    """A module that does what ``root`` does, and compiles under ``torch.jit.script``.

    It is traced with a `Tracer`, whose arguments the others are.
    """
    graph = Tracer(leaf_modules).trace(root, concrete_args)
    owner = root if isinstance(root, nn.Module) else torch.nn.Module()
    return fx.GraphModule(owner, graph)
