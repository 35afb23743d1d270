"""Let oneDNN compute large dense layers of packages for the fbgemm backend.

`torch.nn.functional.linear` packs its weights anew on each call.  oneDNN takes packed weights, adds
the bias and applies a ReLU on the way out.  Its packed weights are of the processor's own layout, so
the archive holds the plain ones: `PackedLinear` packs them in ``__setstate__``, which TorchScript runs
in every loader.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from tessera.serving.packaging.passes.linears import Linear, replace_linears
from tessera.serving.packaging.passes.registry import Pass, Target
from tessera.serving.packaging.stable_names import named_in_packages

SMALLEST_PACKED = 1 << 16
"""Weights of fewer elements are left to oneMKL: calling oneDNN costs 12 us, a small product 3."""


@named_in_packages("pack")
class PackedLinear(nn.Module):
    """``x W^T + b`` of ``weight`` ``[out, in]`` float32 on the CPU, then ReLU if asked for."""

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


@Pass(name="onednn", order=20, backend="fbgemm", device="cpu")
def pack_linears(module: fx.GraphModule, _target: Target) -> None:
    """Replace every linear function of large, fixed weights and of matrices by oneDNN's, in place.

    Where this torch has no oneDNN, nothing is replaced.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return

    def call_onednn(name: str, x: fx.Node, linear: Linear, *, relu: bool) -> fx.Node | None:
        if linear.weight.numel() < SMALLEST_PACKED or not linear.of_matrix:
            return None
        module.add_module(name, PackedLinear(linear.weight, linear.bias, relu=relu))
        return module.graph.call_module(name, (x,))

    replace_linears(module, call_onednn)
