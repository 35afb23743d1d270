"""Neighbouring transforms of raw dense values, in one call of ``tessera::dense_steps``.

As torch's operators they are ten or twenty calls, each of which costs a small batch more than its numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.transforms.joined import grouped
from tessera.training.transforms.preprocessor import Preprocessor


class DenseSteps(nn.Module):
    """Stands for some stages of a `Preprocessor`; ``steps`` are theirs, ``[S, F, 3]``."""

    def __init__(self, steps: Tensor) -> None:
        super().__init__()
        self.steps_SF3: Tensor
        self.register_buffer("steps_SF3", steps)

    def forward(self, values: Tensor, raw: Tensor) -> Tensor:  # noqa: ARG002 - see `DenseStage`
        """``[B, F]`` float32 to the same shape and type."""
        result: Tensor = torch.ops.tessera.dense_steps(values, self.steps_SF3)
        return result


def joined_stages(module: nn.Module) -> dict[int, nn.ModuleList]:
    """By the identity of a `Preprocessor`'s stages, what stands for them in a package for a CPU."""
    return {
        id(part.stages): nn.ModuleList(
            call if isinstance(call, nn.Module) else DenseSteps(call)
            for call in grouped(part.stages)
        )
        for part in module.modules()
        if isinstance(part, Preprocessor)
    }
