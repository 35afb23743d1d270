"""Dense layers in bfloat16 on a GPU: torch's own products, which run on the tensor cores.

A layer's weights, bias, input and output are bfloat16 and its sums float32.  Everything else stays
float32, except for what goes from one such layer to the next, directly or through a ReLU: it stays
as it is, for rounding a second time changes nothing.

Layers of fewer than `THIN` inputs or outputs stay float32.  A model's last layer is one of them:
rounded to 8 bits, many samples would have the same score.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.linears import (
    RELUS,
    Linear,
    linear_arguments,
    parameter,
    replace_linears,
)
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.passes.tensors import replace

NARROW = torch.bfloat16
"""The layers' type."""

STEP = 8
"""Rows of whole 16 bytes: with others a product took up to 4.9 times as long on an H200."""

THIN = 16
"""Layers with fewer inputs or outputs have too little work for a tensor core."""

LINEAR_RELU = torch.ops.aten._addmm_activation  # noqa: SLF001 - torch's own name for it
"""``(bias, x, transposed weight)``: a linear layer and its ReLU in one kernel."""


def is_thin(weight: Tensor) -> bool:
    """Whether a layer of ``weight`` ``[N, K]`` stays float32."""
    return min(weight.shape) < THIN


def narrow_weight(weight: Tensor) -> Tensor:
    """``[N, K]`` as `NARROW`, with columns of zeros up to a multiple of `STEP`."""
    return nn.functional.pad(weight.detach(), (0, -weight.shape[1] % STEP)).to(NARROW)


def narrow_linears(module: fx.GraphModule) -> int:
    """Make every linear function that is not thin one in bfloat16, in place; the bytes saved."""
    saved = 0
    packed: dict[tuple[int, int], list[str]] = {}  # a layer may be called several times

    def stored(name: str, linear: Linear) -> list[str]:
        nonlocal saved
        saved += linear.weight.numel() * (linear.weight.element_size() - NARROW.itemsize)
        names = []
        narrow_bias = None if linear.bias is None else linear.bias.to(NARROW)
        for what, tensor in (("weight", narrow_weight(linear.weight)), ("bias", narrow_bias)):
            if tensor is not None:
                module.register_buffer(f"{name}_{what}", tensor)
                names.append(f"{name}_{what}")
        return names

    def call_narrow(name: str, x: fx.Node, linear: Linear, *, relu: bool) -> fx.Node | None:
        if is_thin(linear.weight):
            return None
        if linear.key not in packed:
            packed[linear.key] = stored(name, linear)
        graph = module.graph
        parameters = [graph.get_attr(buffer) for buffer in packed[linear.key]]
        narrow = graph.call_method("to", (x, NARROW))
        missing = -linear.weight.shape[1] % STEP
        if missing:
            narrow = graph.call_function(nn.functional.pad, (narrow, (0, missing)))
        if relu and linear.bias is not None and linear.of_matrix:
            transposed = graph.call_method("t", (parameters[0],))
            product = graph.call_function(LINEAR_RELU, (parameters[1], narrow, transposed))
        else:
            product = graph.call_function(nn.functional.linear, (narrow, *parameters))
            if relu:
                product = graph.call_function(torch.relu, (product,))
        return graph.call_method("to", (product, torch.float32))

    replace_linears(module, call_narrow)
    return saved


def keep_narrow(module: fx.GraphModule) -> None:
    """Leave out the widening between two layers in bfloat16, in place.

    Values do not change: a ReLU of widened numbers is the widened ReLU, and a widened number rounds
    to itself.
    """
    graph = module.graph
    for node in list(graph.nodes):
        wide = node.args[0] if node.args else None
        if not isinstance(wide, fx.Node) or not is_cast(wide, torch.float32):
            continue
        product = wide.args[0]
        assert isinstance(product, fx.Node)
        if not is_narrow(module, product):
            continue
        if node.target in RELUS and len(wide.users) == 1:
            with graph.inserting_before(node):
                positive = graph.call_function(torch.relu, (product,))
                replace(node, graph.call_method("to", (positive, torch.float32)))
        elif is_cast(node, NARROW):
            node.replace_all_uses_with(product)
    graph.eliminate_dead_code()
    module.recompile()


def merge_casts(module: fx.GraphModule) -> None:
    """Round each tensor to `NARROW` once, whoever reads it, in place."""
    for node in module.graph.nodes:
        casts = sorted(user for user in node.users if is_cast(user, NARROW))  # as in the graph
        for other in casts[1:]:
            other.replace_all_uses_with(casts[0])
    module.graph.eliminate_dead_code()


def is_cast(node: fx.Node, kind: torch.dtype) -> bool:
    """Whether a node gives its input as another type."""
    return node.op == "call_method" and node.target == "to" and node.args[1:] == (kind,)


def is_narrow(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is the output of a layer or cross layer in bfloat16, or the ReLU of one."""
    if node.target is torch.relu:
        (node,) = node.all_input_nodes
    if node.target is getattr(torch.ops.tessera, "cross_layer", None):
        return True
    weight: object
    if node.target is LINEAR_RELU:
        transposed = node.args[2]
        assert isinstance(transposed, fx.Node)
        weight = transposed.args[0] if transposed.target == "t" else transposed
    elif node.target is nn.functional.linear:
        _, weight, _ = linear_arguments(node)
    else:
        return False
    fixed = parameter(module, weight) if isinstance(weight, fx.Node) else None
    return fixed is not None and fixed.dtype == NARROW


@Pass(name="narrow_linears", order=20, device="cuda", dense_dtype=("bf16", "fp8"))
def _run(module: fx.GraphModule, _target: Target) -> int:
    saved = narrow_linears(module)
    keep_narrow(module)
    return saved
