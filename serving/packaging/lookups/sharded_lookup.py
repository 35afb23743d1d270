"""Lookups in tables that are spread over the devices of one process.

Ids go from one device to all, each shard looks up what it has, and the vectors come back to one
device.  Every shard gets all ids; its plan leaves out the features that it has nothing of.

* A table that is whole in one shard, or cut by columns: an element is summed where it lies, so the
  answer has the same bits as without shards.
* A table cut by rows, on GPUs: each shard sums the rows that it has, and the sums are added; that
  is another order of summation.
* A table cut by rows, on CPUs: the stored rows of a bag's ids are copied together in the order of
  the ids and then summed as one table, so that the bits are the same as without shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, fx, nn

from tessera.kernels.plan import IdRule, OutOfRange
from tessera.kernels.tables import FeatureLookup
from tessera.serving.package.devices import SHARD
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.gathered_rows import gathering, pool_stored_rows
from tessera.serving.packaging.lookups.shard_parts import (
    Shard,
    ShardRows,
    beside,
    is_cut_by_rows,
    partial_lookup,
    piece_in,
    shard_in,
    shifted,
)
from tessera.serving.packaging.lookups.tessera_plan import feature_lookup, skipped
from tessera.serving.packaging.tables.stored import StoredPiece, StoredTable, StoredTables
from tessera.training.modules.hashing import FeatureHasher, HashSpec
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

fx.wrap("beside")
fx.wrap("shifted")
fx.wrap("pool_stored_rows")


class ShardedLookup(nn.Module):
    """`LookupBackend.lookup` over rows in several shards."""

    def __init__(
        self,
        tables: StoredTables,
        features: Sequence[FeatureSpec | None],
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self._count = len(features)
        specs = [feature for feature in features if feature is not None]
        stored = {spec.name: tables.table(spec.table) for spec in specs}
        self._cut = [name for name in names if is_cut_by_rows(stored[name])]
        self._for_gpu = tables.for_gpu
        # The place of each column: which of the parts, side by side, it is in.
        columns: dict[str, dict[int, range]] = {name: {} for name in names}
        end = 0
        self._shards: list[tuple[str, int]] = []
        for number, buffer in enumerate(tables.buffers):
            local, width = _local(features, stored, number, columns, end)
            if local is None:
                continue
            name = f"{SHARD}{number}"
            self.add_module(name, Shard(buffer, local, for_gpu=tables.for_gpu))
            self._shards.append((name, width))
            end += width
        self._resolves = bool(self._cut)
        if self._resolves:
            self._add_cut(tables, features, stored)
            for name in self._cut:
                dim = stored[name].info.dim
                columns[name] = {0: range(end, end + dim)}
                end += dim
        # By the table's columns, whatever shard has them.
        order = [
            column for name in names for _, own in sorted(columns[name].items()) for column in own
        ]
        self._reorder = order != list(range(end))
        self.columns: Tensor
        if self._reorder:
            self.register_buffer("columns", torch.tensor(order))

    def _add_cut(
        self,
        tables: StoredTables,
        features: Sequence[FeatureSpec | None],
        stored: dict[str, StoredTable],
    ) -> None:
        """What tables that are cut by rows need."""
        self._keys = [str(place) if f is None else f.name for place, f in enumerate(features)]
        self.hasher = FeatureHasher(
            [
                HashSpec(name=key, rows=1, hashing="none")
                if feature is None
                else HashSpec.of(feature)
                for key, feature in zip(self._keys, features, strict=True)
            ]
        )
        by_name = {f.name: place for place, f in enumerate(features) if f is not None}
        self._cut_places = [by_name[name] for name in self._cut]
        self._cut_dims = [stored[name].info.dim for name in self._cut]
        self._cut_shards = [f"{SHARD}{number}_cut" for number in range(len(tables.buffers))]
        if self._for_gpu:
            starts = [0, *accumulate(self._cut_dims)]
            column = dict(zip(self._cut, starts, strict=False))
            self._cut_width = starts[-1] + 1
            for number, buffer in enumerate(tables.buffers):
                begins, local = [], []
                for feature in features:
                    piece = None
                    if feature is not None and feature.name in column:
                        piece = piece_in(stored[feature.name], number)
                    if feature is None or piece is None:
                        begins.append(0)
                        local.append(skipped(self._cut_width - 1))
                        continue
                    begins.append(piece.placement.row_begin)
                    local.append(partial_lookup(feature, stored[feature.name], piece, column))
                shard = Shard(buffer, local, begins, for_gpu=tables.for_gpu)
                self.add_module(self._cut_shards[number], shard)
            return
        for name, buffer in zip(self._cut_shards, tables.buffers, strict=True):
            self.add_module(name, ShardRows(buffer))
        for number, name in enumerate(self._cut):
            feature = next(f for f in features if f is not None and f.name == name)
            places, plan, book = gathering(feature, tables)
            self.register_buffer(f"cut_places_{number}", places)
            self.register_buffer(f"cut_plan_{number}", plan)
            self.register_buffer(f"cut_book_{number}", book)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """See `LookupBackend.lookup`."""
        rows = ids
        if self._resolves:
            raw = KeyedJaggedTensor(self._keys, ids, lengths=lengths)
            rows = self.hasher(raw).values()
        parts = []
        for name, width in self._shards:
            shard = shard_in(self, name, Shard)
            part = torch.ops.tessera.lookup(
                shard.rows,
                shard.plan,
                beside(rows, shard.rows),
                beside(lengths, shard.rows),
                width,
                None if weights is None else beside(weights, shard.rows),
                launch=shard.launch,
            )
            parts.append(beside(part, lengths))
        if self._resolves:
            parts += self._cut_by_rows(rows, lengths, weights)
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return pooled.index_select(1, self.columns) if self._reorder else pooled

    def _cut_by_rows(self, rows: Tensor, lengths: Tensor, weights: Tensor | None) -> list[Tensor]:
        if not self._for_gpu:
            buffers = [shard_in(self, name, ShardRows).rows for name in self._cut_shards]
            return [
                pool_stored_rows(
                    buffers,
                    getattr(self, f"cut_places_{number}"),
                    getattr(self, f"cut_plan_{number}"),
                    getattr(self, f"cut_book_{number}"),
                    rows,
                    lengths,
                    weights,
                    place,
                    self._count,
                    dim,
                )
                for number, (place, dim) in enumerate(
                    zip(self._cut_places, self._cut_dims, strict=True)
                )
            ]
        total: Tensor | None = None
        for name in self._cut_shards:
            shard = shard_in(self, name, Shard)
            there = beside(lengths, shard.rows)
            partial = torch.ops.tessera.lookup(
                shard.rows,
                shard.plan,
                shifted(beside(rows, shard.rows), there, shard.begins),
                there,
                self._cut_width,
                None if weights is None else beside(weights, shard.rows),
                launch=shard.launch,
            )
            part = beside(partial, lengths)
            total = part if total is None else total + part
        assert total is not None
        return [total.narrow(1, 0, self._cut_width - 1)]


def _local(
    features: Sequence[FeatureSpec | None],
    stored: dict[str, StoredTable],
    shard: int,
    columns: dict[str, dict[int, range]],
    begin: int,
) -> tuple[list[FeatureLookup] | None, int]:
    """One shard's lookups of tables not cut by rows, and their width.

    Notes where each run of a feature's columns is, by its first column.
    """
    found: list[tuple[FeatureSpec, StoredPiece] | None] = []
    width = 0
    for feature in features:
        piece = None
        if feature is not None and not is_cut_by_rows(stored[feature.name]):
            piece = piece_in(stored[feature.name], shard)
        found.append(None if feature is None or piece is None else (feature, piece))
        width += 0 if piece is None else piece.dim
    if width == 0:
        return None, 0
    local, column = [], 0
    for one in found:
        if one is None:
            local.append(skipped(width))
            continue
        feature, piece = one
        local.append(feature_lookup(feature, (piece, stored[feature.name].kind), column))
        place = range(begin + column, begin + column + piece.dim)
        columns[feature.name][piece.placement.column_begin] = place
        column += piece.dim
    if any(is_cut_by_rows(stored[f.name]) for f in features if f is not None):
        # The ids are rows by then.
        local = [
            replace(lookup, id_rule=IdRule.NONE, out_of_range=_as_row(lookup)) for lookup in local
        ]
    return local, width + (1 if None in found else 0)


def _as_row(lookup: FeatureLookup) -> OutOfRange:
    zero = lookup.out_of_range is OutOfRange.ZERO
    return OutOfRange.ZERO if zero else OutOfRange.CLAMP
