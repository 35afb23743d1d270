"""torch.fx: the model's forward as one flat graph of operators.

Tracing runs the Python of the model once with stand-ins for its tensors.  The jagged types,
dictionaries and loops over features are gone afterwards; nothing of the batch size or of a
bag's length is in the graph, because the stand-ins have none.
"""

from __future__ import annotations

from torch import fx, nn


class _FlatTracer(fx.Tracer):
    """Goes into torch's own layers too.

    Scripted as modules, each of them would be a class in the archive, and torch writes the
    fields of such a class in an order that differs from run to run.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del m, module_qualified_name
        return False


def trace(module: nn.Module) -> fx.GraphModule:
    """Trace ``module`` (in evaluation mode) and drop what its result does not need."""
    graph = _FlatTracer().trace(module)
    for node in graph.nodes:
        # fx spells annotations in a way that TorchScript cannot read; without any, TorchScript
        # takes every argument for a tensor, which it is.
        node.type = None
        if node.target is nn.functional.dropout:  # in evaluation it changes nothing
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)
