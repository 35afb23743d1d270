"""What quantized collections do with the operator's output: means, and one vector per feature."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tessera.training.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


class MeanColumns:
    """Divides the columns of averaged features by their bags' sizes.

    The operator adds up everywhere: sums of different devices can be added, and averages not.

    Args:
        tables: the tables; features are in their order.
    """

    def __init__(self, tables: Sequence[EmbeddingBagConfig]) -> None:
        features = [table for table in tables for _ in table.feature_names]
        self._averaged = [table.pooling is PoolingType.MEAN for table in features]
        self._columns = [table.embedding_dim for table in features]

    @property
    def needed(self) -> bool:
        """Whether any feature is averaged."""
        return any(self._averaged)

    def divide(self, sums: Tensor, lengths: Tensor) -> Tensor:
        """``sums`` ``[B, sum of D]`` divided where they are averages; ``lengths`` ``[T * B]``."""
        if not self.needed:
            return sums
        bounds = [0, *accumulate(self._columns)]
        columns = [
            sums.narrow(1, start, width)
            for start, width in zip(bounds, self._columns, strict=False)
        ]
        return torch.cat(self.divide_columns(columns, lengths), dim=1)

    def divide_columns(self, columns: Sequence[Tensor], lengths: Tensor) -> list[Tensor]:
        """Like `divide` of each feature's ``[B, D]``, on the lengths' device."""
        if not self.needed:
            return list(columns)
        sizes_TB = lengths.view(len(self._averaged), -1).clamp(min=1)
        return [
            (column / sizes_TB[index].unsqueeze(1)).to(column.dtype) if averaged else column
            for index, (column, averaged) in enumerate(zip(columns, self._averaged, strict=True))
        ]


def split_by_feature(
    features: KeyedJaggedTensor, vectors: Tensor, names: Sequence[str], *, need_indices: bool
) -> dict[str, JaggedTensor]:
    """The vectors ``[N, D]``, one per id of ``features``, cut; see `named_vectors`."""
    bounds = features.offset_per_key()
    parts = [vectors[bounds[index] : bounds[index + 1]] for index in range(len(names))]
    return named_vectors(features, parts, names, need_indices=need_indices)


def named_vectors(
    features: KeyedJaggedTensor,
    vectors: Sequence[Tensor],
    names: Sequence[str],
    *,
    need_indices: bool,
) -> dict[str, JaggedTensor]:
    """The vectors of each feature, in its bags.

    Args:
        features: what was looked up.
        vectors: ``[N_f, D]`` of each feature.
        names: the output's name of each feature.
        need_indices: whether the ids are the weights.
    """
    ids, bags = features.offset_per_key(), features.lengths_offset_per_key()
    values, lengths = features.values(), features.lengths()
    return {
        name: JaggedTensor(
            vectors[index],
            values[ids[index] : ids[index + 1]] if need_indices else None,
            lengths[bags[index] : bags[index + 1]],
            validate=False,
        )
        for index, name in enumerate(names)
    }
