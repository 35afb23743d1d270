"""Batches of random ids, for programs that measure or try a model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
from torch.utils.data import IterableDataset

from tessera.training.data.batch import Batch
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class RandomRecDataset(IterableDataset[Batch]):
    """An endless or bounded stream of random `Batch`es, without weights.

    The numbers are drawn as TorchRec draws them, so that one seed gives both the same batches: of each
    feature the bags' lengths, then its ids, and after the features dense values and labels.

    Args:
        keys: names of the sparse features.
        batch_size: samples per batch.
        hash_size: ids are below it; None: 100.
        hash_sizes: the same for each feature, instead.
        ids_per_feature: the most ids of a bag; None: 2.
        ids_per_features: the same for each feature, instead.
        num_dense: dense values per sample, from a normal distribution.
        manual_seed: of the draws; None: torch's own state.
        num_batches: batches of a pass; None: without end.
        num_generated_batches: so many batches are made and given again and again; below 0 each is new.
        min_ids_per_feature: the fewest ids of a bag; None: ``ids_per_feature``, or 0 without it.
        min_ids_per_features: the same for each feature, instead.

    Labels are int64, 0 or 1; lengths int32, ids int64.

    Raises:
        ValueError: a list has not one number for each key.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        if min_ids_per_feature is None:
            min_ids_per_feature = ids_per_feature or 0
        count = len(keys)
        self._keys = list(keys)
        self._hash_sizes = hash_sizes or [hash_size or 100] * count
        self._most = ids_per_features or [ids_per_feature or 2] * count
        self._fewest = min_ids_per_features or [min_ids_per_feature] * count
        for name, numbers in (
            ("hash_sizes", self._hash_sizes),
            ("ids_per_features", self._most),
            ("min_ids_per_features", self._fewest),
        ):
            if len(numbers) != count:
                raise ValueError(
                    f"{name} has {len(numbers)} entries for {count} keys; give one for each"
                )
        self._batch_size = batch_size
        self._num_dense = num_dense
        self.num_batches = sys.maxsize if num_batches is None else num_batches
        self._generator = None
        if manual_seed is not None:
            self._generator = torch.Generator().manual_seed(manual_seed)
        self._kept = [self._draw() for _ in range(num_generated_batches)]
        self._makes_new_ones = num_generated_batches < 0

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a pass, the kept ones from the first on."""
        batches = iter(self._draw, None) if self._makes_new_ones else itertools.cycle(self._kept)
        return itertools.islice(batches, self.num_batches)

    def __len__(self) -> int:
        """Batches of a pass; ``sys.maxsize`` without end."""
        return self.num_batches

    def _draw(self) -> Batch:
        lengths, ids = [], []
        size, generator = (self._batch_size,), self._generator
        for fewest, most, rows in zip(self._fewest, self._most, self._hash_sizes, strict=True):
            length = torch.randint(fewest, most + 1, size, dtype=torch.int32, generator=generator)
            lengths.append(length)
            ids.append(torch.randint(0, rows, (int(length.sum()),), generator=generator))
        return Batch(
            sparse_features=KeyedJaggedTensor.from_lengths_sync(
                self._keys, torch.cat(ids), torch.cat(lengths)
            ),
            dense_features=torch.randn(self._batch_size, self._num_dense, generator=generator),
            labels=torch.randint(0, 2, size, generator=generator),
        )
