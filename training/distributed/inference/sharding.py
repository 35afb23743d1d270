"""One process, several devices: what table-wise, column-wise and row-wise inference share.

Each of `cw_sharding` (which serves table-wise too) and `rw_sharding` answers how ids travel
to the devices, which rows are there, and how vectors travel back.  Everything is traced by
torch.fx.  Legend: ``W`` devices, ``B`` samples, ``D`` columns, ``N_f`` ids of feature ``f``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.environment import rank_device
from tessera.training.distributed.inference.lookup import (
    InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup,
)
from tessera.training.distributed.inference.shards import (
    InferShard,
    InferTable,
    copy_block,
    local_config,
)
from tessera.training.distributed.sharding.mixins import FeatureShardingMixIn
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

Route = Tensor | None
"""Where each id went, if that must be known to bring its vector back."""


class InferSharding(nn.Module, FeatureShardingMixIn):
    """Tables of one sharding type on the devices of this process.

    Args:
        tables: the tables and their blocks.
        stored: each table's rows ``[rows, row bytes]`` uint8; they are copied.
        world_size: ``W``.
        device: the devices' type.
        pooled: whether the vectors of a bag are added up.
        fused_params: of the lookups.
    """

    def __init__(
        self,
        tables: list[InferTable],
        stored: Mapping[str, Tensor],
        *,
        world_size: int,
        device: torch.device,
        pooled: bool,
        fused_params: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._tables = tables = self._on_devices(tables, world_size)
        self._world_size = world_size
        self._pooled = pooled
        self._devices = [rank_device(device.type, rank) for rank in range(world_size)]
        self._feature_names = [name for table in tables for name in table.config.feature_names]
        configs, own = zip(
            *(local_config(tables, rank, device.type) for rank in range(world_size)), strict=True
        )
        self._configs = list(configs)
        grouped = [[config] if config.embedding_tables else [] for config in configs]
        kind = InferGroupedPooledEmbeddingsLookup if pooled else InferGroupedEmbeddingsLookup
        self._lookup: InferGroupedLookupMixin = kind(grouped, world_size, fused_params, device)
        self._blocks_of_devices = own
        for table, shard, rows in self.stored_blocks():
            copy_block(table, shard, stored[table.name], rows)
        self._connect(device)

    def _on_devices(self, tables: list[InferTable], world_size: int) -> list[InferTable]:
        """The tables, with whatever blocks the lookups need besides the plan's."""
        del world_size
        return tables

    @abstractmethod
    def _connect(self, device: torch.device) -> None:
        """Make what `input_dist` and the ways back need; the lookups are there already."""

    def lookup(self) -> InferGroupedLookupMixin:
        """The lookups of all devices."""
        return self._lookup

    def stored_blocks(self) -> list[tuple[BaseEmbeddingConfig, InferShard, Tensor]]:
        """Each block's table, place and rows ``[rows, row bytes]`` uint8, device by device."""
        return [
            (table.config, shard, rows)
            for lookup, blocks in zip(self._lookup.lookups(), self._blocks_of_devices, strict=True)
            for (table, shard), rows in zip(blocks, lookup.rows.tables(), strict=True)
        ]

    def feature_names(self) -> list[str]:
        """The features, tables in order."""
        return self._feature_names

    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each device receives."""
        return [config.feature_names() for config in self._configs]

    @abstractmethod
    def input_dist(self, features: KeyedJaggedTensor) -> tuple[KJTList, Route]:
        """How ids travel: each device's features, with its own row numbers."""

    @abstractmethod
    def merged(self, outputs: list[Tensor]) -> Tensor:
        """The pooled vectors of all devices in one tensor on the first device."""

    @property
    @abstractmethod
    def in_order(self) -> bool:
        """Whether the columns of `merged` are those of the features, tables in order."""

    @property
    def output_device(self) -> torch.device:
        """The first device."""
        return self._devices[0]

    @abstractmethod
    def pooled_columns(self, outputs: list[Tensor]) -> list[Tensor]:
        """How pooled vectors travel back: ``[B, D]`` of each feature."""

    @abstractmethod
    def unpooled_vectors(
        self, dist_input: KJTList, route: Route, outputs: list[Tensor]
    ) -> list[Tensor]:
        """How unpooled vectors travel back: ``[N_f, D]`` of each feature."""
