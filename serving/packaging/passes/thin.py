"""Let one kernel compute each layer that is too thin for tensor cores, in packages for GPUs.

A model's first layer reads a few raw values and gives many columns, its last one the reverse.  Computed in
float32 by torch's functions, each takes a product, a ReLU and a cast of the wide side; `tessera::linear_thin`
reads or writes the wide side once, in the type of the layers beside it.  Values stay those of float32.
"""

from __future__ import annotations

import torch
from torch import fx

from tessera.serving.packaging.passes.linears import Linear, replace_linears
from tessera.serving.packaging.passes.narrow import NARROW, is_cast, is_narrow, is_thin
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace


@Pass(name="thin", order=36, device="cuda", dense_dtype=("bf16", "fp8"))
def fuse_thin(module: fx.GraphModule, _target: Target) -> None:
    """Make every thin layer of a matrix one operator, with the casts around it, in place."""
    graph = module.graph
    packed: dict[tuple[int, int], list[str]] = {}  # a layer may be called several times

    def stored(name: str, linear: Linear) -> list[str]:
        bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
        names = []
        for what, tensor in (("weight", linear.weight.contiguous()), ("bias", bias)):
            module.register_buffer(f"{name}_{what}", tensor)
            names.append(f"{name}_{what}")
        return names

    def call_thin(name: str, x: fx.Node, linear: Linear, *, relu: bool) -> fx.Node | None:
        if not is_thin(linear.weight) or not linear.of_matrix:
            return None
        if linear.key not in packed:
            packed[linear.key] = stored(f"thin_{name}", linear)
        buffers = [graph.get_attr(buffer) for buffer in packed[linear.key]]
        if is_cast(x, torch.float32) and is_narrow(module, x.all_input_nodes[0]):
            (x,) = x.all_input_nodes
        elif not linear.contiguous_rows:
            x = graph.call_method("contiguous", (x,))
        return graph.call_function(torch.ops.tessera.linear_thin, (x, *buffers, relu))

    replace_linears(module, call_thin)
    _round_results(graph)


def _round_results(graph: fx.Graph) -> None:
    """Let a layer that only layers in bfloat16 read give that."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.tessera.linear_thin):
        if node.users and all(is_cast(user, NARROW) for user in node.users):
            with graph.inserting_before(node):
                rounded = graph.call_function(node.target, node.args, {"dtype": NARROW})
            for cast in list(node.users):
                replace(cast, rounded)
    graph.eliminate_dead_code()
