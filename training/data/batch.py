"""`Batch`: what a model is given in one step.

Shapes: ``B`` samples, ``F`` sparse features, ``N`` ids in all bags of a batch.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
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
        sparse_features: raw int64 ids, feature-major; a missing category is an empty bag.  With
            float32 weights where a column is a weighted list; ids of other columns have weight 1.
        labels: ``[B]`` float32 of one label, ``[B, L]`` of several; NaN where one is missing.
        weights: ``[B]`` float32, what the samples count in the loss; None: all the same.
        row_numbers: ``[B]`` int64, the rows' numbers in the dataset; None where it gives none.
        item_ids: ``[B + E]`` int64, as the data has them, where a model for retrieval is trained: the
            features then are those of ``E`` items more than there are samples.  None elsewhere.
        item_log_shares: ``[B + E]`` float32, the log of the share of all candidates of a step that an
            item is expected to have; None elsewhere.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor | None = None
    row_numbers: torch.Tensor | None = None
    item_ids: torch.Tensor | None = None
    item_log_shares: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """The number of samples ``B``."""
        return int(self.labels.shape[0])

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The same batch on ``device``."""
        return self._each(lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, for asynchronous copies to a GPU."""
        return self._each(lambda part: part.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> Batch:
        parts: dict[str, Any] = {n: None if p is None else change(p) for n, p in vars(self).items()}
        return dataclasses.replace(self, **parts)


class PackedBatch(Pipelineable):
    """Samples as their dataset keeps them, of which a `Batch` is made where they are copied to.

    What a loader's thread would do to each value, a GPU does in passing, and fewer bytes travel.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of samples ``B``."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:  # noqa: FBT001, FBT002 - as of torch.Tensor
        """The batch on ``device``, without ``row_numbers``."""


def make_batch(
    *,
    dense: npt.NDArray[np.float32],
    keys: Sequence[str],
    lengths: npt.NDArray[np.int32],
    values: npt.NDArray[np.int64],
    labels: npt.NDArray[np.float32],
    value_weights: npt.NDArray[np.float32] | None = None,
    weights: npt.NDArray[np.float32] | None = None,
    row_numbers: npt.NDArray[np.int64] | None = None,
) -> Batch:
    """A `Batch` over the memory of numpy arrays, which nobody may write to afterwards.

    ``dense`` is ``[B, F_dense]``; ``keys`` are the ``F`` sparse features' names, ``lengths`` ``[F * B]``
    feature-major, ``values`` ``[N]`` their ids and ``value_weights`` ``[N]`` the ids' weights, if they
    have any.  The caller answers for the lengths: none is
    below 0, and their sum is ``N``.
    """
    return Batch(
        dense_features=torch.from_numpy(dense),
        sparse_features=KeyedJaggedTensor(
            list(keys),
            torch.from_numpy(values),
            weights=_tensor(value_weights),
            lengths=torch.from_numpy(lengths),
            stride=len(labels),
            # Checking our own arrays would be half of a batch's cost, and would wake torch's
            # threads in the middle of the step that they are busy with.
            validate=False,
        ),
        labels=torch.from_numpy(labels),
        weights=_tensor(weights),
        row_numbers=_tensor(row_numbers),
    )


def _tensor(array: npt.NDArray[Any] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)
