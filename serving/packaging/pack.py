"""Replace the graph's matrix products by ones with packed weights: Tessera's or oneDNN's.

`torch.nn.functional.linear` packs its weights anew on each call.  Both others take packed
weights, add the bias and apply a ReLU on the way out.

Tessera's layouts are the same for every processor and lie in the archive as they are.  oneDNN's
packed weights are of the processor's own layout, so the archive holds the plain ones:
`PackedLinear` packs them in ``__setstate__``, which TorchScript runs in every loader.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.stable_names import named_in_packages

SMALLEST_PACKED = 1 << 16
"""Weights of fewer elements are left to oneMKL: calling oneDNN costs 12 us, a small product 3."""

RELUS = (torch.relu, nn.functional.relu, "relu", "relu_")
"""What a ReLU can be in a traced graph; one that works in place must be its input's only user."""


@named_in_packages("pack")
class PackedLinear(nn.Module):
    """``x W^T + b``, then ReLU if asked for.

    Args:
        weight: ``[out, in]`` float32 on the CPU.
        bias: ``[out]`` or None.
        relu: whether a ReLU follows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, relu: bool) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.bias = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        self.activation = "relu" if relu else "none"
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)  # noqa: SLF001 - torch's own name for it

    def forward(self, x: Tensor) -> Tensor:
        """``[B, in]`` to ``[B, out]`` float32."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001 - likewise
            x, self.packed, self.bias, self.activation, [], None
        )
        return y

    @torch.jit.export
    def __getstate__(self) -> tuple[Tensor, Tensor, str, bool]:
        return self.weight, self.bias, self.activation, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[Tensor, Tensor, str, bool]) -> None:
        self.weight = state[0]
        self.bias = state[1]
        self.activation = state[2]
        self.training = state[3]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(state[0])  # noqa: SLF001 - see above


def pack_linears(module: fx.GraphModule) -> None:
    """Replace every linear function of large, fixed float32 weights by oneDNN's, in place.

    Where this torch has no oneDNN, nothing is replaced.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return

    def call_onednn(
        name: str, x: fx.Node, weight: Tensor, bias: Tensor | None, *, relu: bool
    ) -> fx.Node | None:
        if weight.numel() < SMALLEST_PACKED:
            return None
        module.add_module(name, PackedLinear(weight, bias, relu=relu))
        return module.graph.call_module(name, (x,))

    replace_linears(module, call_onednn)


def pack_panels(module: fx.GraphModule, dense_dtype: str) -> int:
    """Replace every linear function by ``tessera::linear`` or ``linear_bf16``, in place.

    Args:
        module: changed in place.
        dense_dtype: a name of `DENSE_TYPES`.

    Returns:
        By how many bytes the weights are smaller than in float32.
    """
    kind = DENSE_TYPES[dense_dtype]
    saved = 0

    def call_tessera(
        name: str, x: fx.Node, weight: Tensor, bias: Tensor | None, *, relu: bool
    ) -> fx.Node | None:
        nonlocal saved
        saved += kind.saved_bytes(weight)
        packed = kind.pack(weight.detach(), None if bias is None else bias.detach())
        buffers = []
        # Buffers of the graph's own module: a class for each layer would be written to the
        # archive in an order that differs from run to run.
        for what, tensor in zip(("weights", "bias"), packed, strict=True):
            module.register_buffer(f"{name}_{what}", tensor)
            buffers.append(module.graph.get_attr(f"{name}_{what}"))
        return module.graph.call_function(kind.operator, (x, *buffers, len(weight), relu))

    replace_linears(module, call_tessera)
    return saved


def replace_linears(module: fx.GraphModule, call: Callable[..., fx.Node | None]) -> None:
    """Put what ``call`` inserts in the place of each linear function and of the ReLU behind it.

    Args:
        module: changed in place.
        call: takes a name, the input's node, weight, bias and whether a ReLU follows; returns
            None where the function is to stay.
    """
    graph = module.graph
    linears = graph.find_nodes(op="call_function", target=nn.functional.linear)
    for number, node in enumerate(linears):
        x, weight, bias = linear_arguments(node)
        relu = _only_relu(node)
        with graph.inserting_before(node):
            new = call(
                f"linear_{number}",
                x,
                parameter(module, weight),
                None if bias is None else parameter(module, bias),
                relu=relu is not None,
            )
        if new is not None:
            (relu or node).replace_all_uses_with(new)
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def linear_arguments(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight and bias of a call of `torch.nn.functional.linear`."""
    given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | node.kwargs
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def _only_relu(node: fx.Node) -> fx.Node | None:
    """The ReLU that is the only user of ``node``, if so."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target in RELUS else None


def parameter(module: fx.GraphModule, node: fx.Node) -> Tensor:
    """The parameter that ``node`` reads."""
    assert node.op == "get_attr", node
    found = operator.attrgetter(str(node.target))(module)
    assert isinstance(found, Tensor)
    return found
