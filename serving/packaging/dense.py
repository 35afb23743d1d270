"""The dense layers of any module, swapped for Tessera's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.dense_types import DENSE_TYPES, dense_operators
from tessera.serving.packaging.pack import RELUS


class PanelLinear(nn.Linear):
    """`torch.nn.Linear` by Tessera's operators: a row's bits do not depend on the others.

    Args:
        linear: the layer that it stands for; float32, on the CPU.
        matrix: whether its input has two dimensions, ``[B, K]``; otherwise it has more.
        dense_dtype: how its weights are stored, a name of `DENSE_TYPES`.
    """

    def __init__(self, linear: nn.Linear, *, matrix: bool, dense_dtype: str) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._matrix = matrix
        self._kind = DENSE_TYPES[dense_dtype]
        bias = None if linear.bias is None else linear.bias.detach()
        weights, biases = self._kind.pack(linear.weight.detach(), bias)
        self.panels: Tensor
        self.panel_bias: Tensor
        self.register_buffer("panels", weights, persistent=False)
        self.register_buffer("panel_bias", biases, persistent=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        """``[..., K]`` to ``[..., N]`` float32."""
        rows = input.contiguous() if self._matrix else input.flatten(0, -2).contiguous()
        product: Tensor = self._kind.operator(
            rows, self.panels, self.panel_bias, self.out_features, False
        )
        if not self._matrix:
            product = torch.unflatten(product, 0, input.shape[:-1])
        return product


def input_dimensions(
    module: nn.Module, run: Callable[[], object], inside: Callable[[nn.Linear], bool]
) -> dict[nn.Linear, set[int]]:
    """How many dimensions the inputs of each linear layer have while ``run`` runs ``module``."""
    seen: dict[nn.Linear, set[int]] = {}

    def look(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.Linear)
        seen.setdefault(layer, set()).add(arguments[0].dim())

    handles = [
        part.register_forward_pre_hook(look)
        for part in module.modules()
        if type(part) is nn.Linear and part.weight.dtype == torch.float32 and inside(part)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def panel_layers(seen: dict[nn.Linear, set[int]], dense_dtype: str) -> dict[nn.Linear, PanelLinear]:
    """Stand-ins for the layers whose inputs have two or more dimensions."""
    return {
        layer: PanelLinear(layer, matrix=dimensions == {2}, dense_dtype=dense_dtype)
        for layer, dimensions in seen.items()
        if min(dimensions) >= 2
    }


def fuse_relus(module: fx.GraphModule) -> None:
    """Let Tessera's dense layers apply the ReLU that is their result's only user, in place."""
    graph = module.graph
    layers = [
        node
        for operator in dense_operators()
        for node in graph.find_nodes(op="call_function", target=operator)
    ]
    for node in layers:
        users = list(node.users)
        if len(users) == 1 and users[0].target in RELUS and users[0].args[0] is node:
            node.args = (*node.args[:4], True)
            users[0].replace_all_uses_with(node)
            graph.erase_node(users[0])
    module.recompile()
