"""Looking ids up in a sorted array, in eager mode, traced graphs and TorchScript alike."""

from __future__ import annotations

import torch
from torch import Tensor


def find(sorted_keys: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``keys`` (int64, any shape) stand in ``sorted_keys`` ``[U]``, ``U`` at least 1.

    Returns:
        A place in ``[0, U)`` for each, and whether the key is there.
    """
    places = torch.searchsorted(sorted_keys, keys).clamp(max=sorted_keys.size(0) - 1)
    return places, sorted_keys[places] == keys
