"""Neighbouring dense stages in one call of ``tessera::dense_steps``, for batches on a GPU.

As torch's functions a stage is some five kernels.  A training step waits for the CPU that launches
them, so that ten launches cost more than their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tessera.training.transforms.transform import DenseStage


class JoinedStages:
    """Calls stages of a `Preprocessor`, of which those that are steps of the operator go together.

    What the stages were fitted to may change between calls.
    """

    def __init__(self) -> None:
        self._calls: list[nn.Module | Tensor] = []
        # What they were made of.  The buffers are kept, so that no other lies where one of them did.
        self._of: list[tuple[Tensor, int]] = []

    def __call__(self, stages: Iterable[nn.Module], values: Tensor) -> Tensor:
        """Raw values ``[B, F]`` float32 to the same shape and type, as the stages one after the other."""
        stages, raw = list(stages), values
        # Every stage has buffers.  The version of one goes up with every change in place.
        of = [
            (buffer, buffer._version)  # noqa: SLF001 (torch has no other way to ask)
            for stage in stages
            for buffer in stage.buffers()
        ]
        same = len(of) == len(self._of) and all(
            own is before and version == version_before
            for (own, version), (before, version_before) in zip(of, self._of, strict=True)
        )
        if not same:
            self._of = of
            self._calls = [
                call if isinstance(call, nn.Module) else call.to(values.device)
                for call in grouped(stages)
            ]
        for call in self._calls:
            if isinstance(call, nn.Module):
                values = call(values, raw)
            else:
                values = torch.ops.tessera.dense_steps(values, call)
        return values


def grouped(stages: Iterable[nn.Module]) -> list[nn.Module | Tensor]:
    """Stages that the operator does not have, and between them the steps ``[S, F, 3]`` of neighbouring others."""
    made: list[nn.Module | Tensor] = []
    waiting: list[Tensor] = []
    for stage in stages:
        steps = stage.steps() if isinstance(stage, DenseStage) else None
        if steps is not None:
            waiting.append(steps)
            continue
        if waiting:
            made.append(torch.stack(waiting))
            waiting = []
        made.append(stage)
    if waiting:
        made.append(torch.stack(waiting))
    return made
