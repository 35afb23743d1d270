"""Finding the sharded modules whose input can be sent ahead of the forward pass.

The model is traced symbolically.  A sharded module qualifies if everything that it is called with
is a part of the batch itself: ``batch.sparse_features``, ``batch["ids"].user``, or a result of modules
that may run ahead (see `tessera.training.distributed.train_pipeline.postproc`).  What else is computed
on the way to it cannot be known before the forward pass runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from tessera.errors import UserError
from tessera.training.distributed.plan.sharded_module import ShardedModule, outermost
from tessera.training.distributed.train_pipeline.arguments import ArgInfo
from tessera.training.distributed.train_pipeline.postproc import PipelinedPostproc
from tessera.training.sparse.wrapped_steps import wrapped_functions_take_sparse_types


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


@dataclass
class RunAhead:
    """What of a model a pipeline may run ahead.

    Attributes:
        modules: path, module and arguments of the sharded modules whose ids can be sent ahead.
        postprocs: the modules that run on the batch before that.
    """

    modules: list[tuple[str, ShardedModule[Any, Any, Any, Any], list[ArgInfo]]]
    postprocs: list[PipelinedPostproc]


class _Arguments:
    """Says how the arguments of a graph's steps are taken from the batch."""

    def __init__(self, model: nn.Module, graph: fx.Graph, *, pipeline_postproc: bool) -> None:
        self._model = model
        self._pipeline_postproc = pipeline_postproc
        self._calls = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
        self.postprocs: dict[str, PipelinedPostproc] = {}

    def called_once(self, node: fx.Node) -> bool:
        """Whether the module of ``node`` is called nowhere else."""
        return self._calls[str(node.target)] == 1

    def of(self, node: fx.Node) -> list[ArgInfo] | None:
        """The arguments that a module is called with; None if one of them is computed."""
        found = [self._info(argument, None) for argument in node.args]
        found += [self._info(argument, name) for name, argument in node.kwargs.items()]
        infos = [info for info in found if info is not None]
        return infos if len(infos) == len(found) else None

    def _info(self, argument: Any, name: str | None) -> ArgInfo | None:
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
            if argument.op == "placeholder":
                return ArgInfo(attributes, is_getitems, name)
            postproc = self._postproc(argument) if argument.op == "call_module" else None
            if postproc is None:
                return None
            return ArgInfo(attributes, is_getitems, name, source=postproc.take)
        if isinstance(argument, (list, tuple, dict)):
            return self._collection(argument, name)
        return ArgInfo([], [], name, constant=argument, is_constant=True)

    def _collection(
        self, argument: list[Any] | tuple[Any, ...] | dict[Any, Any], name: str | None
    ) -> ArgInfo | None:
        """A list, tuple or dictionary, whose elements are each taken from the batch."""
        by_key = argument.items() if isinstance(argument, dict) else enumerate(argument)
        parts = {key: self._info(part, None) for key, part in by_key}
        known = {key: info for key, info in parts.items() if info is not None}
        if len(known) < len(parts):
            return None
        made = next(kind for kind in (dict, list, tuple) if isinstance(argument, kind))

        def take(batch: Any) -> Any:
            taken = {key: info.take(batch) for key, info in known.items()}
            return taken if made is dict else made(taken.values())

        return ArgInfo([], [], name, source=take)

    def _postproc(self, node: fx.Node) -> PipelinedPostproc | None:
        """The module of ``node``, if it may run before the forward pass."""
        path = str(node.target)
        if path in self.postprocs:
            return self.postprocs[path]
        module = self._model.get_submodule(path)
        if (
            not self._pipeline_postproc
            or not self.called_once(node)
            or isinstance(module, (ShardedModule, torch.jit.ScriptModule))
            or any(parameter.requires_grad for parameter in module.parameters())
        ):
            return None
        args = self.of(node)
        if not args:
            return None
        self.postprocs[path] = PipelinedPostproc(module, path, args)
        return self.postprocs[path]


def pipelineable_modules(
    model: nn.Module, graph: fx.Graph, *, pipeline_postproc: bool = False
) -> RunAhead:
    """Find the sharded modules that depend on the batch alone.

    A module that is called more than once in a forward pass does not qualify.

    Args:
        model: what was traced.
        graph: its steps, see `trace`.
        pipeline_postproc: whether modules without trainable parameters may run ahead on the batch.

    Raises:
        UserError: the model takes more than one argument.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise UserError(
            f"the forward pass of {type(model).__name__} takes {len(inputs)} arguments; a pipeline "
            "hands it one, the batch"
        )
    arguments = _Arguments(model, graph, pipeline_postproc=pipeline_postproc)
    modules = []
    for node in graph.nodes:
        if node.op != "call_module" or not arguments.called_once(node):
            continue
        module = model.get_submodule(str(node.target))
        if not isinstance(module, ShardedModule):
            continue
        infos = arguments.of(node)
        if infos is not None:
            modules.append((str(node.target), module, infos))
    return RunAhead(modules, list(arguments.postprocs.values()))
