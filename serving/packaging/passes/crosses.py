"""Make one operator of each layer of a cross network in packages for GPUs with bfloat16 layers.

A layer adds ``x0 * (W v + b)`` to ``x``.  Its operator takes and gives bfloat16, so that a network's
intermediate vectors, the widest that a model has, pass through memory at half their size, and only once.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.linears import linear_arguments, parameter
from tessera.serving.packaging.passes.narrow import (
    NARROW,
    is_cast,
    is_narrow,
    keep_narrow,
    merge_casts,
)
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace, seen

_ADD = (operator.add, torch.add)
_MULTIPLY = (operator.mul, torch.mul)


@Pass(name="crosses", order=30, device="cuda", dense_dtype=("bf16", "fp8"))
def fuse_crosses(module: fx.GraphModule, _target: Target) -> None:
    """Make one operator of ``x + x0 * y``, ``y`` being a layer in bfloat16, in place.

    Where nothing else reads ``y``, a matrix, its product is part of the operator, which gives
    bfloat16.  Elsewhere it widens ``y`` itself and gives float32.
    """
    graph = module.graph
    for number, node in enumerate(list(graph.nodes)):
        found = _find(module, node)
        if found is None:
            continue
        with graph.inserting_before(node):
            if _whole(module, found):
                replace(node, _call(module, found, f"cross_{number}_bias"))
            else:
                parts = (found.x, found.x0, found.y)
                replace(node, graph.call_function(torch.addcmul, parts))
    merge_casts(module)
    keep_narrow(module)


@dataclass(frozen=True, kw_only=True)
class _Cross:
    """``x + x0 * y``, float32, where ``wide`` is what widened ``y``."""

    x: fx.Node
    x0: fx.Node
    y: fx.Node
    wide: fx.Node


def _find(module: fx.GraphModule, node: fx.Node) -> _Cross | None:
    if node.target not in _ADD or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    for product, x in itertools.permutations(node.all_input_nodes):
        if product.target not in _MULTIPLY or len(product.users) > 1:
            continue
        for wide, x0 in itertools.permutations(product.all_input_nodes, 2):
            if is_cast(wide, torch.float32) and _is_float(x) and _is_float(x0):
                y = wide.all_input_nodes[0]
                if is_narrow(module, y):
                    return _Cross(x=x, x0=x0, y=y, wide=wide)
    return None


def _is_float(node: fx.Node) -> bool:
    known = seen(node)
    return known is not None and known.dtype == torch.float32


def _whole(module: fx.GraphModule, cross: _Cross) -> bool:
    """Whether the layer's product can be part of the operator."""
    shapes = [known.shape for known in map(seen, (cross.x, cross.x0, cross.wide)) if known]
    return (
        cross.y.target is nn.functional.linear
        and len(cross.y.users) == len(cross.wide.users) == 1
        and len(shapes) == 3
        and len(set(shapes)) == 1
        and len(shapes[0]) == 2
        and _fixed(module, cross.y)[0] is not None
    )


def _fixed(module: fx.GraphModule, layer: fx.Node) -> tuple[Tensor | None, bool]:
    """The layer's weight, and whether it has a bias."""
    _, weight, bias = linear_arguments(layer)
    return parameter(module, weight), bias is not None


def _call(module: fx.GraphModule, cross: _Cross, name: str) -> fx.Node:
    """Insert the operator and what widens its result; ``name`` is free."""
    graph = module.graph
    v, weight, bias = linear_arguments(cross.y)
    if bias is None:
        fixed = parameter(module, weight)
        assert fixed is not None
        module.register_buffer(name, fixed.new_zeros(len(fixed)))
        bias = graph.get_attr(name)
    x0, x = (graph.call_method("to", (part, NARROW)) for part in (cross.x0, cross.x))
    crossed = graph.call_function(torch.ops.tessera.cross_layer, (x0, x, v, weight, bias))
    return graph.call_method("to", (crossed, torch.float32))
