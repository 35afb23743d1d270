"""TorchScript: the traced graph as something that runs without Python."""

from __future__ import annotations

import warnings

import torch
from torch import fx


def script(graph_module: fx.GraphModule) -> torch.jit.ScriptModule:
    """Script a traced module, in evaluation mode and without gradients."""
    graph_module.eval().requires_grad_(requires_grad=False)
    with warnings.catch_warnings():
        # torch says that TorchScript is deprecated; `tessera.serving.runner.Runner` is the
        # place where another kind of artifact joins.  The other one is about annotations in
        # torch's own GraphModule.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*deprecated")
        warnings.filterwarnings("ignore", message=".*doesn't support instance-level annotations")
        scripted = torch.jit.script(graph_module)
    assert isinstance(scripted, torch.jit.ScriptModule)
    return scripted
