"""Fuse what a cross network does between its layers in packages for GPUs with bfloat16 layers."""

from __future__ import annotations

import itertools
import operator

import torch
from torch import fx

from tessera.serving.packaging.passes.narrow import is_cast, is_narrow
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace, seen

_ADD = (operator.add, torch.add)
_MULTIPLY = (operator.mul, torch.mul)


@Pass(name="crosses", order=30, device="cuda", dense_dtype="bf16")
def fuse_crosses(module: fx.GraphModule, _target: Target) -> None:
    """Make one operator of ``x + a * y`` where ``y`` is a layer's widened output, in place.

    It widens ``y`` itself and reads and writes each of the others once: what DCN does between its
    layers.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in _ADD or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        for product, x in itertools.permutations(node.all_input_nodes):
            if product.target not in _MULTIPLY or len(product.users) > 1:
                continue
            for wide, a in itertools.permutations(product.all_input_nodes, 2):
                if not (is_cast(wide, torch.float32) and _is_float(x) and _is_float(a)):
                    continue
                if is_narrow(module, wide.all_input_nodes[0]):
                    with graph.inserting_before(node):
                        y = wide.all_input_nodes[0]
                        replace(node, graph.call_function(torch.addcmul, (x, a, y)))
                    break
    graph.eliminate_dead_code()


def _is_float(node: fx.Node) -> bool:
    known = seen(node)
    return known is not None and known.dtype == torch.float32
