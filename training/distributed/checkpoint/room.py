"""Where a checkpoint's reader puts tensors that it reads whole: memory, or something larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Room(Protocol):
    """Makes the empty tensors that a reader fills."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an empty tensor of this shape and dtype."""
        ...

    def settle(self, tensor: Tensor) -> None:
        """Some of ``tensor``, which `empty` made, has been filled and is not needed for now."""
        ...
