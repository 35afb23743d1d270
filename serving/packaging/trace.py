"""torch.fx: the model's forward as one flat graph of operators.

Tracing runs the Python of the model once with stand-ins for its tensors.  The jagged types,
dictionaries and loops over features are gone afterwards; nothing of the batch size or of a
bag's length is in the graph, because the stand-ins have none.
"""

from __future__ import annotations

from torch import fx, nn


def trace(module: nn.Module) -> fx.GraphModule:
    """Trace ``module`` (in evaluation mode) and drop what its result does not need."""
    graph_module = fx.symbolic_trace(module)
    for node in graph_module.graph.nodes:
        # fx spells annotations in a way that TorchScript cannot read; without any, TorchScript
        # takes every argument for a tensor, which it is.
        node.type = None
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module
