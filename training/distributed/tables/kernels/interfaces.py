"""What kernels are given, and what those promise whose backward pass updates the tables.

Legend: F features, B samples, N ids, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.optim.row_updates import HyperParameters


@dataclass(frozen=True, kw_only=True)
class TableGroup:
    """Describes the tables of a kernel.

    Attributes:
        tables: the shards; features come in their order.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum; without per-id weights.
        device: where lookups are computed.
    """

    tables: Sequence[ShardedEmbeddingTable]
    pooled: bool
    mean: bool
    device: torch.device

    @property
    def table_of_feature(self) -> list[int]:
        """Return, per feature, the place of its table."""
        return [place for place, table in enumerate(self.tables) for _ in table.feature_names]

    @property
    def out_cols(self) -> int:
        """Return the number of columns of what a lookup gives."""
        if not self.pooled:
            return self.tables[0].local_cols
        return sum(self.tables[place].local_cols for place in self.table_of_feature)

    def pooling_mode(self, fbgemm: Any) -> Any:
        """Return FBGEMM's ``PoolingMode``."""
        pooling = fbgemm.PoolingMode.MEAN if self.mean else fbgemm.PoolingMode.SUM
        return pooling if self.pooled else fbgemm.PoolingMode.NONE


class FusedTables(ABC):
    """Tables whose backward pass updates them.

    Attributes:
        weights: per table ``[local_rows, local_cols]``, zeros at first; views.
        states: per table its optimizer states, views.
        step: int64 scalar on the CPU, updates so far.
    """

    weights: list[Tensor]
    states: list[list[Tensor]]
    step: Tensor

    @abstractmethod
    def look_up(self, bags: Bags, hyper: HyperParameters) -> Tensor:
        """Look up; the backward pass of the result updates the tables.

        Args:
            bags: of all features; with weights for sum pooling only.
            hyper: of this batch.

        Returns:
            ``[B, sum of D]``, or unpooled ``[N, D]``.
        """
