"""`Batch`: what a model is given in one step.

Shapes: ``B`` samples, ``F`` sparse features, ``N`` ids in all bags of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


@dataclass
class Batch:
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

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Batch:
        """The same batch on ``device``."""
        return Batch(
            dense_features=self.dense_features.to(device, non_blocking=non_blocking),
            sparse_features=self.sparse_features.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, for asynchronous copies to a GPU."""
        return Batch(
            dense_features=self.dense_features.pin_memory(),
            sparse_features=self.sparse_features.pin_memory(),
            labels=self.labels.pin_memory(),
        )


def make_batch(
    *,
    dense: npt.NDArray[np.float32],
    keys: Sequence[str],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.int64],
    labels: npt.NDArray[np.float32],
) -> Batch:
    """A `Batch` over the memory of numpy arrays, which nobody may write to afterwards.

    The caller answers for the lengths: none below 0, and their sum is ``N``.

    Args:
        dense: ``[B, F_dense]``.
        keys: the ``F`` sparse features' names.
        lengths: ``[F * B]``, feature-major.
        values: ``[N]``, the ids in the order of ``lengths``.
        labels: ``[B]``.
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
