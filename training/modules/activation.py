"""Activations that torch does not have."""

# ruff: noqa: A002 - the argument that TorchRec users know

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(LayerNorm(x))``.

    Args:
        input_dims: sizes of the last dimensions, over which is normalised; an int: of the last one.
        device: where the norm's weights are.
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        sizes = input_dims if isinstance(input_dims, int) else list(input_dims)
        self.norm = nn.Sequential(nn.LayerNorm(sizes, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """The same shape."""
        scale: Tensor = self.norm(input)
        return input * scale
