"""TorchScript: the traced graph as something that runs without Python."""

from __future__ import annotations

import warnings

import torch
from torch import fx

from tessera.errors import UserError
from tessera.serving.package.torchscript import expected_deprecation


def script(graph_module: fx.GraphModule) -> torch.jit.ScriptModule:
    """Script a traced module, in evaluation mode and without gradients, or raise a `UserError`."""
    # Tensors that the graph no longer reads.
    read = {str(node.target) for node in graph_module.graph.nodes if node.op == "get_attr"}
    tensors = (graph_module.named_parameters, graph_module.named_buffers)
    for name, _ in [pair for named in tensors for pair in named(recurse=False)]:
        if name not in read:
            delattr(graph_module, name)
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


def _refused(error: Exception) -> str:
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (
        f"TorchScript cannot compile the traced module: {' '.join(words[:6])}; write that "
        "operation another way, or put it into a typed function at the top of its file that is "
        "marked with torch.fx.wrap"
    )
