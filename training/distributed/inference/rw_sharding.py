"""Row-wise inference: a block of every table's rows on each device.

Ids: sorted by the block that holds their row, each device gets those of its block.  Rows: one
block of all tables on every device.  Vectors: the devices' sums are added up; of unpooled
lookups each id's vector is put back in the id's place.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from tessera.training.distributed.inference import bucketize as infer_bucketize
from tessera.training.distributed.inference.sharding import InferSharding, Route
from tessera.training.distributed.inference.shards import InferShard, InferTable, row_bounds
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.distributed.travel.one_to_all import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
)
from tessera.training.fbgemm import import_sparse_operators
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class InferRwEmbeddingSharding(InferSharding):
    """Row-wise sharding of quantized tables on the devices of one process."""

    def _on_devices(self, tables: list[InferTable], world_size: int) -> list[InferTable]:
        """Every device looks up all tables."""
        return [_on_every_device(table, world_size) for table in tables]

    def _connect(self, device: torch.device) -> None:
        import_sparse_operators()
        world_size = self._world_size
        features = [table for table in self._tables for _ in table.config.feature_names]
        bounds = [row_bounds(table, world_size) for table in features]
        self._columns = [table.config.embedding_dim for table in features]
        self._block_sizes = torch.tensor([max(own[1], 1) for own in bounds])
        self._row_bounds = [torch.tensor(own) for own in bounds]
        self._row_counts = torch.tensor([own[-1] for own in bounds])
        self._warnings = torch.zeros(1, dtype=torch.int64)
        self._one_to_all = KJTOneToAll([len(features)] * world_size, world_size, device)
        self._reduce = EmbeddingsAllToOneReduce(self._devices[0], world_size)
        self._all_to_one = EmbeddingsAllToOne(self._devices[0], world_size, 0)

    def input_dist(self, features: KeyedJaggedTensor) -> tuple[KJTList, Route]:
        """Each device's ids, counted from its first row."""
        own = selection.select_features(features, self._feature_names)
        sorted_ids = infer_bucketize.sort_by_block(
            own,
            self._block_sizes,
            self._row_bounds,
            self._world_size,
            not self._pooled,
            self._row_counts,
            self._warnings,
        )
        route = sorted_ids[1] if not self._pooled else None
        return self._one_to_all(sorted_ids[0]), route

    def merged(self, outputs: list[Tensor]) -> Tensor:
        """The sum over devices."""
        sums: Tensor = self._reduce(outputs)
        return sums

    @property
    def in_order(self) -> bool:
        """Every device holds all tables in order."""
        return True

    def pooled_columns(self, outputs: list[Tensor]) -> list[Tensor]:
        """The sum over devices, cut by features."""
        sums = self.merged(outputs)
        bounds = [0, *accumulate(self._columns)]
        return [
            sums.narrow(1, start, width)
            for start, width in zip(bounds, self._columns, strict=False)
        ]

    def unpooled_vectors(
        self, dist_input: KJTList, route: Route, outputs: list[Tensor]
    ) -> list[Tensor]:
        """Each id's vector in the id's place, cut by features."""
        assert route is not None
        merged = self._all_to_one(outputs)
        if self._devices[0].type != "cpu":
            route = route.to(self._devices[0], non_blocking=True)
        vectors = merged.index_select(0, route)
        counts = [dist_input[rank].length_per_key() for rank in range(self._world_size)]
        parts, start = [], 0
        for feature in range(len(self._feature_names)):
            stop = start + sum(own[feature] for own in counts)
            parts.append(vectors[start:stop])
            start = stop
        return parts


def _on_every_device(table: InferTable, world_size: int) -> InferTable:
    """The table with a block of no rows on devices that hold none."""
    held = {shard.rank for shard in table.shards}
    width, rows = table.config.embedding_dim, table.config.num_embeddings
    empty = [
        InferShard(rank=rank, row=rows, rows=0, column=0, columns=width)
        for rank in range(world_size)
        if rank not in held
    ]
    return InferTable(
        config=table.config,
        shards=[*table.shards, *empty],
        is_weighted=table.is_weighted,
    )
