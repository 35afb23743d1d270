"""Weights of a dense layer as ``torch.ops.tessera.linear`` reads them.

Shapes: ``K`` inputs, ``N`` outputs, ``W`` outputs of a panel, ``P`` panels.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL = 64
"""Outputs of a panel: what the kernels keep in registers for all inputs."""

NARROW_PANEL = 16
"""For layers of at most this many outputs; the kernels' widest vector."""


def pack_linear(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and bias in panels, the last one filled up with zeros.

    Args:
        weight: ``[N, K]`` float32, as in `torch.nn.Linear`.
        bias: ``[N]`` float32 or None.

    Returns:
        ``[P, K, W]`` and ``[P * W]`` float32.
    """
    outputs, inputs = weight.shape
    panel = NARROW_PANEL if outputs <= NARROW_PANEL else PANEL
    panels = -(-outputs // panel)
    rows = weight.new_zeros(panels * panel, inputs)
    rows[:outputs] = weight
    packed_bias = weight.new_zeros(panels * panel)
    if bias is not None:
        packed_bias[:outputs] = bias
    packed = rows.view(panels, panel, inputs).transpose(1, 2)
    return packed.clone(memory_format=torch.contiguous_format), packed_bias
