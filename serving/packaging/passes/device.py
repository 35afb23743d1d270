"""Let a graph run on GPUs: inputs are copied there, and outputs to the host."""

from __future__ import annotations

import torch
from torch import fx

from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.trace import FACTORIES

HOME = "tessera_home"
"""An empty tensor that is on the first device."""


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


@Pass(name="device", order=70, device="cuda")
def _run(module: fx.GraphModule, _target: Target) -> None:
    _make_there(module)
    _copy_there_and_back(module)
