"""torch.fx: the model's forward as one flat graph of operators.

Tracing runs the Python of the model once with stand-ins for its tensors.  The jagged types,
dictionaries and loops over features are gone afterwards; nothing of the batch size or of a
bag's length is in the graph, because the stand-ins have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from tessera.errors import UserError
from tessera.serving.packaging.collections.hashing import values_in
from tessera.users_code import first_line, users_place

# Their Python looks at shapes, but TorchScript compiles them whole.
_TORCHS_LEAVES = (
    torch.jit.ScriptModule,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)

FACTORIES = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.zeros,
)
"""Functions of torch that make a tensor of sizes alone, and so do not see a stand-in."""

# What a traced module has beside the tensors that its graph reads.
_TAKEN = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))

_REMEDY = (
    "write a choice between values with torch.where; put the branch into a function of its own at "
    "the top of the module's file, typed and marked with torch.fx.wrap, which TorchScript then "
    "compiles as it is; or name the submodule in leaf_modules to have it compiled whole"
)


class _FlatTracer(fx.Tracer):
    """Goes into torch's own layers too, but into none of ``leaves`` (qualified or class names).

    Scripted as modules, each of them would be a class in the archive, and torch writes the
    fields of such a class in an order that differs from run to run.
    """

    def __init__(self, leaves: Collection[str]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.leaves = frozenset(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_left_whole(m, module_qualified_name.removeprefix("module."), self.leaves)

    def create_node(  # noqa: PLR0917 - fx's signature
        self,
        kind: str,
        target: fx.node.Target,
        args: tuple[fx.node.Argument, ...],
        kwargs: dict[str, fx.node.Argument],
        name: str | None = None,
        type_expr: Any | None = None,
    ) -> fx.Node:
        """Name the module's tensors by their paths in it, without that of `Predict` around it."""
        if kind == "get_attr" and name is None:
            name = self.graph._target_to_str(str(target).removeprefix("module."))  # noqa: SLF001 - fx's own rule
        return super().create_node(kind, target, args, kwargs, name, type_expr)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Go into the module; one of torch's own that cannot be traced is left whole."""
        stack = self.module_stack.copy()
        try:
            return super().call_module(m, forward, args, kwargs)
        except fx.proxy.TraceError:
            if not type(m).__module__.startswith("torch.nn."):
                raise
            # What was traced of it so far has no use, and goes with the other dead code.
            self.module_stack.clear()
            self.module_stack.update(stack)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


def is_left_whole(module: nn.Module, path: str, leaf_modules: Collection[str]) -> bool:
    """Whether the tracer does not look into a submodule, which has the qualified name ``path``."""
    named = path in leaf_modules or type(module).__name__ in leaf_modules
    return named or isinstance(module, _TORCHS_LEAVES)


def trace(module: nn.Module, *, leaf_modules: Collection[str] = ()) -> fx.GraphModule:
    """Trace ``module`` (in evaluation mode; from tensors to tensors) and drop what is not needed.

    ``leaf_modules`` are qualified names or class names of submodules that are not looked into;
    TorchScript compiles them.

    Raises:
        UserError: the module's Python depends on values; names file, line and what to do.
    """
    try:
        with _changed_torch(), _jagged_functions_entered():
            graph = _FlatTracer(leaf_modules).trace(module)
    except Exception as error:
        raise UserError(explain(error)) from error
    for node in graph.nodes:
        # fx spells annotations in a way that TorchScript cannot read; without any, TorchScript
        # takes every argument for a tensor, which it is.
        node.type = None
        if node.target is nn.functional.dropout:  # in evaluation it changes nothing
            node.replace_all_uses_with(node.args[0])
    made = _flat(module, graph)
    made.graph.eliminate_dead_code()
    made.delete_all_unused_submodules()
    made.recompile()
    return made


def _flat(module: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """The graph with every tensor that it reads as an attribute of its own module."""
    root: dict[str, Any] = {}
    names: dict[int, str] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            root[str(node.target)] = module.get_submodule(str(node.target))
        elif node.op == "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), module)
            path = str(node.target).removeprefix("module.")
            name = names.setdefault(id(value), path.replace(".", "_"))
            while name in _TAKEN or root.setdefault(name, value) is not value:
                name = names[id(value)] = f"{name}_"
            node.target = name
    return fx.GraphModule(root, graph)


@contextmanager
def generated_code_forgotten() -> Iterator[None]:
    """Let torch.fx forget at the end the code that it generates for graphs meanwhile.

    The code that it generates marks the functions of a graph with ``torch.fx.wrap``, so that the graph can be
    traced again.  fx keeps the marks, and the code, as long as the process lives, and every trace visits all of them: after
    a hundred packages tracing takes ten times as long.
    """
    wrapped = fx._symbolic_trace._wrapped_fns_to_patch  # noqa: SLF001 - fx has no way to unwrap
    before = set(wrapped)
    try:
        yield
    finally:
        for key in wrapped.keys() - before:
            if "__spec__" not in wrapped[key]:  # a module's own functions stay marked
                del wrapped[key]


@contextmanager
def _changed_torch() -> Iterator[None]:
    """While tracing, let `FACTORIES` take traced sizes, and batch norms any number of dimensions."""
    changes: list[tuple[Any, str, Any]] = [(torch, f.__name__, _traceable(f)) for f in FACTORIES]
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    changes += [(kind, "_check_input_dim", lambda *_: None) for kind in norms]  # its only branch
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for change in changes:
        setattr(*change)
    try:
        yield
    finally:
        for original in originals:
            setattr(*original)


@contextmanager
def _jagged_functions_entered() -> Iterator[None]:
    """While tracing, go into our own functions of jagged tensors.

    ``torch.fx.wrap`` makes them one step for tracers that do not know the keys.  Here the keys are
    known, and what the functions do to the tensors is all that the graph has to hold.
    """
    wrapped = fx._symbolic_trace._wrapped_fns_to_patch  # noqa: SLF001 - fx has no way to unwrap
    entered = {key: names for key, names in wrapped.items() if _takes_jagged(names[key[1]])}
    for key in entered:
        del wrapped[key]
    try:
        yield
    finally:
        wrapped.update(entered)


def _takes_jagged(function: Callable[..., Any]) -> bool:
    if not str(getattr(function, "__module__", "")).startswith("tessera."):
        return False
    kinds = [str(kind) for kind in function.__annotations__.values()]
    return any("Jagged" in kind or "KeyedTensor" in kind for kind in kinds)


def _traceable(factory: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = next(values_in((args, kwargs), fx.Proxy), None)
        if proxy is None:
            return factory(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", factory, args, kwargs)

    return call


def explain(error: Exception) -> str:
    """What a module's author has to know: where, what and how to go on."""
    meaning = first_line(error)
    if isinstance(error, fx.proxy.TraceError) and "control flow" in str(error):
        meaning = (
            "this branch depends on the values of a request, and the traced graph has no branches"
        )
    return f"the module cannot be traced{users_place(error)}: {meaning}; {_REMEDY}"
