"""TorchScript: the traced graph as something that runs without Python."""

from __future__ import annotations

import warnings

import torch
from torch import fx

from tessera.errors import UserError
from tessera.serving.package.torchscript import expected_deprecation
from tessera.serving.packaging.shared_rows import add_shared_method
from tessera.serving.packaging.trace import FACTORIES

HOME = "tessera_home"
"""An empty tensor that is on the first device."""


def script(graph_module: fx.GraphModule, *, device: str = "cpu") -> torch.jit.ScriptModule:
    """Script a traced module, in evaluation mode and without gradients.

    For a CPU it gets the method of `tessera.serving.packaging.shared_rows` where it can have it.

    Args:
        graph_module: the traced module.
        device: the kind of device that it will run on; a graph for GPUs copies its inputs there
            and its outputs to the host.

    Raises:
        UserError: TorchScript cannot compile it.
    """
    _drop_unused(graph_module)
    if device != "cpu":
        _make_there(graph_module)
        _copy_there_and_back(graph_module)
    else:
        add_shared_method(graph_module)
    graph_module.eval().requires_grad_(requires_grad=False)
    with expected_deprecation(), warnings.catch_warnings():
        # About annotations in torch's own GraphModule.
        warnings.filterwarnings("ignore", message=".*doesn't support instance-level annotations")
        try:
            scripted = torch.jit.script(graph_module)
        except (RuntimeError, torch.jit.frontend.NotSupportedError) as error:
            raise UserError(_refused(error)) from error
    assert isinstance(scripted, torch.jit.ScriptModule)
    return scripted


def _drop_unused(graph_module: fx.GraphModule) -> None:
    """Forget tensors that the graph no longer reads."""
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    for name, _ in [
        *graph_module.named_parameters(recurse=False),
        *graph_module.named_buffers(recurse=False),
    ]:
        if name not in read:
            delattr(graph_module, name)


def _copy_there_and_back(graph_module: fx.GraphModule) -> None:
    """Copy inputs to the first device and outputs to the CPU, as the graph's first and last act."""
    graph = graph_module.graph
    graph_module.register_buffer(HOME, torch.empty(0))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1]):
        home = graph.get_attr(HOME)
    with graph.inserting_after(home):
        device = graph.call_function(getattr, (home, "device"))
    for node in inputs:
        with graph.inserting_after(device):
            there = graph.call_method("to", (node, device), {"non_blocking": True})
        node.replace_all_uses_with(there, lambda user, copy=there: user is not copy)
    (last,) = graph.find_nodes(op="output")
    (outputs,) = last.args
    with graph.inserting_before(last):
        # Servers that copy by themselves look for exactly this.
        last.args = ({name: graph.call_method("cpu", (out,)) for name, out in outputs.items()},)
    graph_module.recompile()


def _make_there(graph_module: fx.GraphModule) -> None:
    """Let tensors that the graph makes of sizes alone be made where its inputs are."""
    graph = graph_module.graph
    first = next(iter(graph.nodes))
    made = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target in FACTORIES and "device" not in node.kwargs
    ]
    for node in made:
        with graph.inserting_before(node):
            device = graph.call_function(getattr, (first, "device"))
        node.kwargs = {**node.kwargs, "device": device}
    graph_module.recompile()


def _refused(error: Exception) -> str:
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"TorchScript cannot compile the traced module: {' '.join(words[:6])}; write that "
        "operation another way, or put it into a typed function at the top of its file that is "
        "marked with torch.fx.wrap"
    )
