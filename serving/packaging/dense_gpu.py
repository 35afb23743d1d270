"""Dense layers in bfloat16 on a GPU: torch's own products, which run on the tensor cores.

A layer's weights, bias, input and output are bfloat16 and its sums float32.  Everything else stays
float32, except for what goes from one such layer to the next, directly or through a ReLU: it stays
as it is, for rounding a second time changes nothing.

Layers of fewer than `THIN` inputs or outputs stay float32.  A model's last layer is one of them:
rounded to 8 bits, many samples would have the same score.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.pack import RELUS, linear_arguments, parameter, replace_linears

NARROW = torch.bfloat16
"""The layers' type."""

STEP = 8
"""Rows of whole 16 bytes: with others a product took up to 4.9 times as long on an H200."""

THIN = 16
"""Layers with fewer inputs or outputs have too little work for a tensor core."""

LINEAR_RELU = torch.ops.aten._addmm_activation  # noqa: SLF001 - torch's own name for it
"""``(bias, x, transposed weight)``: a linear layer and its ReLU in one kernel."""

_ADD = (operator.add, torch.add)
_MULTIPLY = (operator.mul, torch.mul)


def is_thin(weight: Tensor) -> bool:
    """Whether a layer of ``weight`` ``[N, K]`` stays float32."""
    return min(weight.shape) < THIN


def narrow_weight(weight: Tensor) -> Tensor:
    """``[N, K]`` as `NARROW`, with columns of zeros up to a multiple of `STEP`."""
    return nn.functional.pad(weight.detach(), (0, -weight.shape[1] % STEP)).to(NARROW)


class NarrowLinear(nn.Linear):
    """`torch.nn.Linear` in bfloat16, between float32 and float32.

    Args:
        linear: the layer that it stands for; float32 and not thin.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.narrow_weight: Tensor
        self.narrow_bias: Tensor | None
        bias = None if linear.bias is None else linear.bias.detach().to(NARROW)
        self.register_buffer("narrow_weight", narrow_weight(linear.weight), persistent=False)
        self.register_buffer("narrow_bias", bias, persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """``[..., K]`` to ``[..., N]`` float32."""
        narrow = input.to(NARROW)
        if self.in_features % STEP:
            narrow = nn.functional.pad(narrow, (0, -self.in_features % STEP))
        product = nn.functional.linear(narrow, self.narrow_weight, self.narrow_bias)
        return product.to(torch.float32)


def narrow_layers(layers: Iterable[nn.Linear]) -> dict[nn.Linear, NarrowLinear]:
    """Stand-ins for those of the ``layers`` that are not thin."""
    return {layer: NarrowLinear(layer) for layer in layers if not is_thin(layer.weight)}


def narrow_linears(module: fx.GraphModule) -> int:
    """Replace every linear function that is not thin by one in bfloat16, in place.

    Args:
        module: changed in place; the inputs of its linear functions are matrices.

    Returns:
        By how many bytes the weights are smaller than in float32.
    """
    saved = 0

    def call_narrow(
        name: str, x: fx.Node, weight: Tensor, bias: Tensor | None, *, relu: bool
    ) -> fx.Node | None:
        nonlocal saved
        if is_thin(weight):
            return None
        saved += weight.numel() * (weight.element_size() - NARROW.itemsize)
        graph = module.graph
        parameters = []
        narrow_bias = None if bias is None else bias.detach().to(NARROW)
        for what, tensor in (("weight", narrow_weight(weight)), ("bias", narrow_bias)):
            if tensor is not None:
                module.register_buffer(f"{name}_{what}", tensor)
                parameters.append(graph.get_attr(f"{name}_{what}"))
        narrow = graph.call_method("to", (x, NARROW))
        if weight.shape[1] % STEP:
            narrow = graph.call_function(nn.functional.pad, (narrow, (0, -weight.shape[1] % STEP)))
        if relu and bias is not None:
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
        if not isinstance(wide, fx.Node) or not _is_cast(wide, torch.float32):
            continue
        product = wide.args[0]
        assert isinstance(product, fx.Node)
        if not _is_narrow(module, product):
            continue
        if node.target in RELUS and len(wide.users) == 1:
            with graph.inserting_before(node):
                positive = graph.call_function(torch.relu, (product,))
                node.replace_all_uses_with(graph.call_method("to", (positive, torch.float32)))
        elif _is_cast(node, NARROW):
            node.replace_all_uses_with(product)
    graph.eliminate_dead_code()
    module.recompile()


def fuse_crosses(module: fx.GraphModule) -> None:
    """Make one operator of ``x + a * y`` where ``y`` is a layer's widened output, in place.

    It widens ``y`` itself and reads and writes each of the others once: what DCN does between its
    layers.

    Args:
        module: changed in place; ``x`` and ``a`` are float32 tensors wherever it has such sums.
    """
    graph = module.graph
    for node in list(graph.nodes):
        if node.target not in _ADD or node.kwargs or len(node.all_input_nodes) != 2:
            continue
        for product, x in itertools.permutations(node.all_input_nodes):
            if product.target not in _MULTIPLY or len(product.users) > 1:
                continue
            for wide, a in itertools.permutations(product.all_input_nodes, 2):
                if _is_cast(wide, torch.float32) and _is_narrow(module, wide.all_input_nodes[0]):
                    with graph.inserting_before(node):
                        y = wide.all_input_nodes[0]
                        node.replace_all_uses_with(graph.call_function(torch.addcmul, (x, a, y)))
                    break
    graph.eliminate_dead_code()
    module.recompile()


def _is_cast(node: fx.Node, kind: torch.dtype) -> bool:
    return node.op == "call_method" and node.target == "to" and node.args[1:] == (kind,)


def _is_narrow(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether it is the output of a layer in bfloat16, or the ReLU of one."""
    if node.target is torch.relu:
        (node,) = node.all_input_nodes
    weight: object
    if node.target is LINEAR_RELU:
        transposed = node.args[2]
        assert isinstance(transposed, fx.Node)
        weight = transposed.args[0] if transposed.target == "t" else transposed
    elif node.target is nn.functional.linear:
        _, weight, _ = linear_arguments(node)
    else:
        return False
    return (
        isinstance(weight, fx.Node)
        and weight.op == "get_attr"
        and parameter(module, weight).dtype == NARROW
    )
