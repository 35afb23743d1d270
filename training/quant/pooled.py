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
        self._starts = list(accumulate(self._columns, initial=0))[:-1]

    @property
    def needed(self) -> bool:
        """Whether any feature is averaged."""
        return any(self._averaged)

    def divide(self, sums: Tensor, lengths: Tensor) -> Tensor:
        """``sums`` ``[B, sum of D]`` divided where they are averages; ``lengths`` ``[T * B]``."""
        if not self.needed:
            return sums
        sizes_TB = lengths.view(len(self._averaged), -1).clamp(min=1)
        divided = []
        for index, (start, width) in enumerate(zip(self._starts, self._columns, strict=True)):
            column = sums.narrow(1, start, width)
            if self._averaged[index]:
                column = (column / sizes_TB[index].unsqueeze(1)).to(column.dtype)
            divided.append(column)
        return torch.cat(divided, dim=1)


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
