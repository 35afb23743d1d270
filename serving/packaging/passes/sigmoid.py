"""Give probabilities of one per sample the same bits wherever in a batch a sample stands.

torch computes whole blocks of numbers with vector instructions but the rest with scalar ones, whose
``exp`` rounds differently.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tessera.serving.packaging.passes.padding import first_rows
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace, seen
from tessera.serving.packaging.stable_names import named_in_packages

SIGMOIDS = (torch.sigmoid, "sigmoid")
"""What a sigmoid can be in a traced graph."""


@named_in_packages("same_bits")
def sigmoid_of_rows(logits: Tensor, dense: Tensor) -> Tensor:
    """``sigmoid`` of the first logits, as many as ``dense`` has rows, by vector instructions."""
    rows = dense.size(0)
    missing = -logits.size(0) % 32  # VECTOR_BLOCK
    if missing > 0:
        logits = torch.constant_pad_nd(logits, [0, missing])
    # A column of a matrix has strides, and torch computes what has strides number by number.
    return torch.sigmoid(logits.contiguous())[:rows]


@Pass(name="sigmoid", order=40)
def outputs_by_rows(module: fx.GraphModule, _target: Target) -> None:
    """Replace each sigmoid whose result is an output ``[B]`` by `sigmoid_of_rows`, in place."""
    graph = module.graph
    dense = graph.find_nodes(op="placeholder")[0]
    (last,) = graph.find_nodes(op="output")
    for output in list(last.all_input_nodes):
        inner = _first(output) if output.target is first_rows else output
        squeezed = inner.target == "squeeze" and inner.args[1:] == (1,) and not inner.kwargs
        sigmoid = _first(inner) if squeezed else inner
        known = seen(inner)
        if sigmoid.target not in SIGMOIDS or known is None or len(known.shape) != 1:
            continue
        with graph.inserting_before(output):
            logits = _first(sigmoid)
            if squeezed:
                logits = graph.call_method("squeeze", (logits, 1))
            rows = graph.call_function(sigmoid_of_rows, (logits, dense))
        rows.meta["is_wrapped"] = True  # as if the module had called it
        replace(output, rows)
    graph.eliminate_dead_code()


def _first(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0]
