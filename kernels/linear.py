"""Weights of a dense layer as ``tessera::linear`` and ``tessera::linear_bf16`` read them.

Shapes: ``K`` inputs, ``N`` outputs, ``W`` outputs of a panel, ``P`` panels, ``G`` groups of 16 outputs,
``C`` blocks of 32 inputs.
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


BF16_INPUTS = 32
"""Inputs of a tile of bfloat16 weights."""

BF16_OUTPUTS = 16
"""Outputs of a tile of bfloat16 weights."""


def pack_linear_bf16(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, rounded to bfloat16, in the tiles of matrix instructions, and the bias.

    Row ``p`` of a tile holds inputs ``2 p`` and ``2 p + 1`` of each of its 16 outputs, side by side.
    The last tiles are filled up with zeros.

    Args:
        weight: ``[N, K]`` float32, as in `torch.nn.Linear`.
        bias: ``[N]`` float32 or None.

    Returns:
        ``[G, C, 16, 32]`` bfloat16 and ``[G * 16]`` float32.
    """
    outputs, inputs = weight.shape
    groups, blocks = -(-outputs // BF16_OUTPUTS), -(-inputs // BF16_INPUTS)
    rows = weight.new_zeros(groups * BF16_OUTPUTS, blocks * BF16_INPUTS, dtype=torch.bfloat16)
    rows[:outputs, :inputs] = weight
    packed_bias = weight.new_zeros(groups * BF16_OUTPUTS)
    if bias is not None:
        packed_bias[:outputs] = bias
    tiles = rows.view(groups, BF16_OUTPUTS, blocks, BF16_INPUTS // 2, 2).permute(0, 2, 3, 1, 4)
    packed = tiles.clone(memory_format=torch.contiguous_format)
    return packed.view(groups, blocks, BF16_INPUTS // 2, 2 * BF16_OUTPUTS), packed_bias
