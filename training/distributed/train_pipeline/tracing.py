"""Finding the sharded modules whose input can be sent ahead of the forward pass.

The model is traced symbolically.  A sharded module qualifies if everything that it is called with
is a part of the batch itself: ``batch.sparse_features``, ``batch["ids"].user``.  What is computed
on the way to it cannot be known before the forward pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.errors import UserError
from tessera.training.distributed.plan.sharded_module import ShardedModule, outermost
from tessera.training.sparse.wrapped_steps import wrapped_functions_take_sparse_types


@dataclass
class ArgInfo:
    """Says which part of the batch an argument is.

    Attributes:
        input_attrs: names or keys on the way into the batch; empty: the batch itself.
        is_getitems: for each of them, whether it is ``[key]`` rather than ``.name``.
        name: of a keyword argument; None for a positional one.
        constant: the argument itself, where it is not a part of the batch but written in the model.
        is_constant: whether it is.
    """

    input_attrs: list[Any]
    is_getitems: list[bool]
    name: str | None
    constant: Any = None
    is_constant: bool = False

    def take(self, batch: Any) -> Any:
        """Return the argument for this batch."""
        if self.is_constant:
            return self.constant
        value = batch
        for attribute, is_item in zip(self.input_attrs, self.is_getitems, strict=True):
            value = value[attribute] if is_item else getattr(value, attribute)
        return value


class Tracer(fx.Tracer):
    """Records a model's forward pass with sharded modules as single steps.

    Args:
        leaf_modules: paths of modules that are not looked into, besides sharded ones, DDP's and
            torch's own.
    """

    # Models that change a buffer in their forward pass do it for real while they are traced.
    proxy_buffer_attributes = False

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or [])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether ``m`` is one step of the graph."""
        return (
            isinstance(m, (ShardedModule, DistributedDataParallel))
            or module_qualified_name in self._leaf_modules
            or super().is_leaf_module(m, module_qualified_name)
        )


def plain_modules(model: nn.Module) -> list[str]:
    """Paths of the outermost modules below ``model`` that neither hold nor are in a sharded one."""

    def is_plain(part: nn.Module) -> bool | None:
        if isinstance(part, ShardedModule):
            return False
        holds_sharded = any(isinstance(below, ShardedModule) for below in part.modules())
        return None if holds_sharded else True  # None: look into it

    return [
        f"{name}.{path}" if path else name
        for name, child in model.named_children()
        for path, _, plain in outermost(child, is_plain)
        if plain
    ]


def trace(model: nn.Module) -> fx.Graph:
    """The steps of a model's forward pass; modules without sharded ones are single steps.

    Raises:
        UserError: the forward pass cannot be traced.
    """
    try:
        with wrapped_functions_take_sparse_types():
            return Tracer(plain_modules(model)).trace(model)
    except Exception as error:
        raise UserError(
            f"the forward pass of {type(model).__name__} cannot be traced, so its input cannot be "
            f"sent ahead: {error}; move what depends on the batch's values into a sub-module "
            "without sharded modules, or train with TrainPipelineBase"
        ) from error


def _arg_info(argument: Any, name: str | None) -> ArgInfo | None:
    """How to take ``argument`` from the batch; None if it is computed."""
    attributes: list[Any] = []
    is_getitems: list[bool] = []
    while isinstance(argument, fx.Node) and argument.op == "call_function":
        accessor = getattr(argument.target, "__name__", "")
        if accessor not in {"getattr", "getitem"} or isinstance(argument.args[1], fx.Node):
            return None
        attributes.insert(0, argument.args[1])
        is_getitems.insert(0, accessor == "getitem")
        argument = argument.args[0]
    if isinstance(argument, fx.Node):
        return ArgInfo(attributes, is_getitems, name) if argument.op == "placeholder" else None
    return ArgInfo([], [], name, constant=argument, is_constant=True)


def pipelineable_modules(
    model: nn.Module, graph: fx.Graph
) -> Iterator[tuple[str, ShardedModule[Any, Any, Any, Any], list[ArgInfo]]]:
    """Path, module and arguments of the sharded modules that depend on the batch alone.

    A module that is called more than once in a forward pass does not qualify.

    Raises:
        UserError: the model takes more than one argument.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise UserError(
            f"the forward pass of {type(model).__name__} takes {len(inputs)} arguments; a pipeline "
            "hands it one, the batch"
        )
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    for path, nodes in calls.items():
        module = model.get_submodule(path)
        if not isinstance(module, ShardedModule) or len(nodes) != 1:
            continue
        found = [_arg_info(argument, None) for argument in nodes[0].args]
        found += [_arg_info(argument, name) for name, argument in nodes[0].kwargs.items()]
        infos = [info for info in found if info is not None]
        if len(infos) == len(found):
            yield path, module, infos
