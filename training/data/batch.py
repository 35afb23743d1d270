"""`Batch`: what a model is given in one step.

Shapes: ``B`` samples, ``F`` sparse features, ``N`` ids in all bags of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """Samples with their labels.

    Attributes:
        dense_features: ``[B, F_dense]`` float32; NaN where the value is missing.
        sparse_features: raw int64 ids, feature-major; a missing category is an empty bag.
        labels: ``[B]`` float32, 0 or 1.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor

    @property
    def size(self) -> int:
        """The number of samples ``B``."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The same batch on ``device``."""
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self._parts()))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, for asynchronous copies to a GPU."""
        return Batch(*(part.pin_memory() for part in self._parts()))

    def record_stream(self, stream: torch.Stream) -> None:
        """See `Pipelineable`."""
        for part in self._parts():
            part.record_stream(stream)

    def _parts(self) -> tuple[Any, ...]:
        return self.dense_features, self.sparse_features, self.labels


def make_batch(
    *,
    dense: npt.NDArray[np.float32],
    keys: Sequence[str],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.int64],
    labels: npt.NDArray[np.float32],
) -> Batch:
    """A `Batch` over the memory of numpy arrays, which nobody may write to afterwards.

    ``dense`` is ``[B, F_dense]``; ``keys`` are the ``F`` sparse features' names, ``lengths`` ``[F * B]``
    feature-major and ``values`` ``[N]`` their ids.  The caller answers for the lengths: none is
    below 0, and their sum is ``N``.
    """
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            list(keys),
            torch.from_numpy(values),
            lengths=torch.from_numpy(lengths),
            stride=len(labels),
            # Checking our own arrays would be half of a batch's cost, and would wake torch's
            # threads in the middle of the step that they are busy with.
            validate=False,
        ),
        labels=torch.from_numpy(labels),
    )
