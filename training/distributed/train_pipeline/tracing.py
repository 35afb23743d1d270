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
from tessera.training.distributed.train_pipeline.arguments import (
    ArgInfo,
    BaseArgInfoStep,
    CallArgs,
    DictArgInfoStep,
    GetAttrArgInfoStep,
    GetItemArgInfoStep,
    ListArgInfoStep,
    NoopArgInfoStep,
    ScalarArgInfoStep,
)
from tessera.training.distributed.train_pipeline.postproc import (
    PipelinedPostproc,
    PostprocArgInfoStep,
)
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

    modules: list[tuple[str, ShardedModule[Any, Any, Any, Any], CallArgs]]
    postprocs: list[PipelinedPostproc]


class ArgInfoStepFactory:
    """Makes steps, for programs that import one name."""

    @classmethod
    def noop(cls) -> NoopArgInfoStep:
        """Return a step that gives what it is given."""
        return NoopArgInfoStep()

    @classmethod
    def get_attr(cls, name: str) -> GetAttrArgInfoStep:
        """Return a step that takes an attribute."""
        return GetAttrArgInfoStep(name)

    @classmethod
    def get_item(cls, index: Any) -> GetItemArgInfoStep:
        """Return a step that takes an item."""
        return GetItemArgInfoStep(index)

    @classmethod
    def postproc(cls, pipelined_postproc_module: PipelinedPostproc) -> PostprocArgInfoStep:
        """Return a step that runs a module ahead."""
        return PostprocArgInfoStep(pipelined_postproc_module)

    @classmethod
    def from_scalar(cls, value: object) -> ScalarArgInfoStep:
        """Return a step that gives a value of the model."""
        return ScalarArgInfoStep(value)

    @classmethod
    def from_list(cls, value: list[Any] | tuple[Any, ...]) -> ListArgInfoStep:
        """Return a step that makes a list or a tuple."""
        return ListArgInfoStep(value)

    @classmethod
    def from_dict(cls, value: dict[Any, Any]) -> DictArgInfoStep:
        """Return a step that makes a dictionary."""
        return DictArgInfoStep(value)


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

    def of(self, node: fx.Node) -> CallArgs | None:
        """The arguments that a module is called with; None if one of them is computed."""
        positional = [self._info(argument) for argument in node.args]
        by_name = {name: self._info(argument) for name, argument in node.kwargs.items()}
        args = [info for info in positional if info is not None]
        kwargs = {name: info for name, info in by_name.items() if info is not None}
        if len(args) < len(positional) or len(kwargs) < len(by_name):
            return None
        return CallArgs(args, kwargs)

    def _info(self, argument: Any) -> ArgInfo | None:
        """How to take ``argument`` from the batch; None if it is computed."""
        info = ArgInfo([])
        while isinstance(argument, fx.Node) and argument.op == "call_function":
            accessor = getattr(argument.target, "__name__", "")
            key = argument.args[1] if len(argument.args) > 1 else None
            if accessor not in {"getattr", "getitem"} or isinstance(key, fx.Node):
                return None
            is_item = accessor == "getitem"
            info.add_step(GetItemArgInfoStep(key) if is_item else GetAttrArgInfoStep(str(key)))
            argument = argument.args[0]
        start = self._start(argument)
        return None if start is None else info.add_step(start)

    def _start(self, argument: Any) -> BaseArgInfoStep | None:
        """The first step, from the batch; None if it is computed."""
        if isinstance(argument, fx.Node):
            if argument.op == "placeholder":
                return NoopArgInfoStep()
            postproc = self._postproc(argument) if argument.op == "call_module" else None
            return None if postproc is None else PostprocArgInfoStep(postproc)
        if isinstance(argument, dict):
            entries = {key: self._info(part) for key, part in argument.items()}
            return None if None in entries.values() else DictArgInfoStep(entries)
        if isinstance(argument, (list, tuple)):
            parts = [self._info(part) for part in argument]
            made = tuple(parts) if isinstance(argument, tuple) else parts
            return None if None in parts else ListArgInfoStep(made)
        return ScalarArgInfoStep(argument)

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
        if args is None or not (args.args or args.kwargs):
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
