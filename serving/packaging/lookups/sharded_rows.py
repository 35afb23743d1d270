"""Unpooled lookups in tables that are spread over the devices of one process."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from tessera.serving.package.devices import SHARD
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.shard_parts import (
    Shard,
    beside,
    is_cut_by_rows,
    partial_lookup,
    shard_in,
)
from tessera.serving.packaging.lookups.tessera_plan import feature_lookup
from tessera.serving.packaging.tables.stored import StoredTables
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

fx.wrap("beside")


class ShardedRows(nn.Module):
    """`LookupBackend.lookup_rows` over rows in several shards, of one feature.

    A vector cut by rows is found in one shard and is zero in the others, so that their sum is the
    vector itself.
    """

    def __init__(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        (feature,) = features
        stored = tables.table(feature.table)
        self._by_rows = is_cut_by_rows(stored)
        if self._by_rows:
            self.hasher = FeatureHasher([HashSpec.of(feature)])
        self._name = feature.name
        self._shards: list[tuple[str, int, int]] = []
        for piece in stored.pieces:
            number = piece.placement.shard
            if self._by_rows:
                looked_up = partial_lookup(feature, stored, piece, {feature.name: 0})
            else:
                looked_up = feature_lookup(feature, (piece, stored.kind), 0)
            self.add_module(
                f"{SHARD}{number}",
                Shard(tables.buffers[number], [looked_up], for_gpu=tables.for_gpu),
            )
            begin = piece.placement.row_begin if self._by_rows else 0
            self._shards.append((f"{SHARD}{number}", piece.dim, begin))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """See `LookupBackend.lookup_rows`."""
        rows = ids
        if self._by_rows:
            rows = self.hasher(KeyedJaggedTensor([self._name], ids, lengths=lengths)).values()
        parts = []
        for name, dim, begin in self._shards:
            shard = shard_in(self, name, Shard)
            own = rows - begin if self._by_rows else rows
            part = torch.ops.tessera.lookup_rows(
                shard.rows,
                shard.plan,
                beside(own, shard.rows),
                beside(lengths, shard.rows),
                dim,
                launch=shard.launch,
            )
            parts.append(beside(part, ids))
        if self._by_rows:
            return functools.reduce(operator.add, parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
