"""TorchScript: the traced graph as something that runs without Python."""

from __future__ import annotations

import warnings

import torch
from torch import fx

from tessera.serving.torchscript import expected_deprecation


def script(graph_module: fx.GraphModule) -> torch.jit.ScriptModule:
    """Script a traced module, in evaluation mode and without gradients."""
    graph_module.eval().requires_grad_(requires_grad=False)
    with expected_deprecation(), warnings.catch_warnings():
        # About annotations in torch's own GraphModule.
        warnings.filterwarnings("ignore", message=".*doesn't support instance-level annotations")
        scripted = torch.jit.script(graph_module)
    assert isinstance(scripted, torch.jit.ScriptModule)
    return scripted
