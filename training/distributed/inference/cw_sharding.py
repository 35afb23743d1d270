"""Column-wise inference: a block of a table's columns on each device.

Ids: each device gets the features of the tables of which it holds columns; a feature goes to
several devices.  Rows: all of a table's, some of its columns.  Vectors: the blocks of a feature
are put side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tessera.training.distributed.inference.sharding import InferSharding, Route
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.distributed.travel.one_to_all import (
    EmbeddingsAllToOne,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

# (device, the block's place in the device's output) of each block of a feature, by column.
_Blocks = list[tuple[int, int]]


class InferCwEmbeddingSharding(InferSharding):
    """Column-wise sharding of quantized tables on the devices of one process."""

    def _connect(self, device: torch.device) -> None:
        self._sent = [name for names in self.feature_names_per_rank() for name in names]
        self._one_to_all = KJTOneToAll(self.features_per_rank(), self._world_size, device)
        busy = sum(1 for count in self.features_per_rank() if count)
        self._all_to_one = EmbeddingsAllToOne(self._devices[0], busy, 1)
        self._seq_all_to_one = SeqEmbeddingsAllToOne(self._devices[0], self._world_size)
        self._blocks = self._find_blocks()
        # Where each device's columns begin, block by block, when all are side by side.
        self._starts: list[list[int]] = []
        start = 0
        for config in self._configs:
            self._starts.append([])
            for width in config.embedding_dims():
                self._starts[-1].append(start)
                start += width
        self._widths = [config.embedding_dims() for config in self._configs]

    def _find_blocks(self) -> list[_Blocks]:
        """Per feature its blocks."""
        places: dict[tuple[int, int, int], int] = {}
        for rank in range(self._world_size):
            count = 0
            for index, table in enumerate(self._tables):
                for shard in table.shards:
                    if shard.rank == rank:
                        places[rank, index, shard.column] = count
                        count += len(table.config.feature_names)
        return [
            [
                (shard.rank, places[shard.rank, index, shard.column] + feature)
                for shard in table.shards
            ]
            for index, table in enumerate(self._tables)
            for feature in range(len(table.config.feature_names))
        ]

    def input_dist(self, features: KeyedJaggedTensor) -> tuple[KJTList, Route]:
        """Each device's features."""
        return self._one_to_all(selection.select_features(features, self._sent)), None

    def merged(self, outputs: list[Tensor]) -> Tensor:
        """All blocks, device by device."""
        busy = [output for output, width in zip(outputs, self._widths, strict=True) if width]
        merged: Tensor = self._all_to_one(busy)
        return merged

    @property
    def in_order(self) -> bool:
        """Whether device by device is also feature by feature, and column by column."""
        starts = [self._starts[rank][place] for blocks in self._blocks for rank, place in blocks]
        return starts == sorted(starts)

    def pooled_columns(self, outputs: list[Tensor]) -> list[Tensor]:
        """The blocks of each feature, side by side."""
        merged = self.merged(outputs)
        return [
            _beside(
                [
                    merged.narrow(1, self._starts[rank][place], self._widths[rank][place])
                    for rank, place in blocks
                ]
            )
            for blocks in self._blocks
        ]

    def unpooled_vectors(
        self, dist_input: KJTList, route: Route, outputs: list[Tensor]
    ) -> list[Tensor]:
        """The blocks of each feature, side by side."""
        del route
        moved = self._seq_all_to_one(outputs)
        bounds = [
            dist_input[rank].offset_per_key() if config.embedding_tables else []
            for rank, config in enumerate(self._configs)
        ]
        return [
            _beside(
                [
                    moved[rank][bounds[rank][place] : bounds[rank][place + 1]]
                    for rank, place in blocks
                ]
            )
            for blocks in self._blocks
        ]


def _beside(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
