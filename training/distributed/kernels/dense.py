"""Tables as ordinary parameters, looked up one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tessera.training.distributed.embedding_types import ShardedEmbeddingTable
from tessera.training.distributed.kernels.bags import Bags


class DenseTables(nn.Module):
    """Tables with dense gradients, as data-parallel training needs them.

    Args:
        tables: the shards; features come in their order.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum; without per-id weights.
        dtype: of the rows.
        device: where the tables live.

    Attributes:
        weights: per table ``[local_rows, local_cols]``, zeros at first.
    """

    def __init__(
        self,
        tables: Sequence[ShardedEmbeddingTable],
        *,
        pooled: bool,
        mean: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._features = [table.num_features() for table in tables]
        self._pooled = pooled
        self._mode = "mean" if mean else "sum"
        self.weights = nn.ParameterList(
            [
                nn.Parameter(
                    torch.zeros(table.local_rows, table.local_cols, dtype=dtype, device=device)
                )
                for table in tables
            ]
        )

    def forward(self, bags: Bags) -> Tensor:
        """``[B, sum of D]``, or unpooled ``[N, D]``."""
        count = sum(self._features)
        batch_size = (bags.offsets.numel() - 1) // count
        bounds = bags.bounds(count)
        parts: list[Tensor] = []
        first = 0
        for weight, features in zip(self.weights, self._features, strict=True):
            last = first + features
            span = slice(bounds[first], bounds[last])
            ids = bags.ids[span]
            if not self._pooled:
                parts.append(functional.embedding(ids, weight))
            else:
                own = bags.offsets[first * batch_size : last * batch_size + 1] - bounds[first]
                weights = None if bags.weights is None else bags.weights[span].to(weight.dtype)
                pooled = functional.embedding_bag(
                    ids,
                    weight,
                    own,
                    mode=self._mode,
                    per_sample_weights=weights,
                    include_last_offset=True,
                )
                parts.extend(pooled.view(features, batch_size, weight.size(1)).unbind(0))
            first = last
        return torch.cat(parts, dim=1 if self._pooled else 0)
