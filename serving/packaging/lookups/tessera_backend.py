"""Tessera's own operators behind `tessera.serving.packaging.lookups.backends.LookupBackend`.

One call hashes the ids, keeps them inside their tables, looks up and pools all features, and
writes each vector to its place in the output, in an order of a sample's own, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.kernels.row_types import RowType
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.shard_parts import PlannedRows
from tessera.serving.packaging.lookups.sharded_lookup import ShardedLookup
from tessera.serving.packaging.lookups.sharded_rows import ShardedRows
from tessera.serving.packaging.lookups.tessera_plan import columns_of, feature_lookup, skipped
from tessera.serving.packaging.tables.stored import StoredPiece, StoredTable, StoredTables


def tessera_lookup(
    tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
) -> nn.Module:
    """See `LookupBackend.lookup`."""
    kind = ShardedLookup if len(tables.buffers) > 1 else TesseraLookup
    return kind(tables, features, names)


def tessera_rows(tables: StoredTables, features: Sequence[FeatureSpec]) -> nn.Module:
    """See `LookupBackend.lookup_rows`."""
    return (ShardedRows if len(tables.buffers) > 1 else TesseraRows)(tables, features)


class TesseraLookup(PlannedRows):
    """One call of ``tessera::lookup`` for everything between raw ids and pooled vectors.

    Of a table of more than `MAX_ROWS` rows, it raises a `UserError`.
    """

    def __init__(
        self, tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
    ) -> None:
        columns = columns_of(features, names)
        used = sum(feature.dim for feature in features if feature is not None)
        planned = [
            skipped(used)
            if feature is None
            else feature_lookup(feature, _whole(tables.table(feature.table)), columns[feature.name])
            for feature in features
        ]
        super().__init__(tables.buffers[0], planned, for_gpu=tables.for_gpu)
        self._used = used
        # What is left out is written, as one column of nothing, behind the others.
        self._width = used + (1 if None in features else 0)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """See `LookupBackend.lookup`."""
        pooled: Tensor = torch.ops.tessera.lookup(
            self.rows, self.plan, ids, lengths, self._width, weights, launch=self.launch
        )
        return pooled if self._width == self._used else pooled.narrow(1, 0, self._used)


class TesseraRows(PlannedRows):
    """One call of ``tessera::lookup_rows`` between raw ids and their vectors, for as many rows."""

    def __init__(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> None:
        planned = [feature_lookup(f, _whole(tables.table(f.table)), 0) for f in features]
        super().__init__(tables.buffers[0], planned, for_gpu=tables.for_gpu)
        self._dim = features[0].dim

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """See `LookupBackend.lookup_rows`."""
        vectors: Tensor = torch.ops.tessera.lookup_rows(
            self.rows, self.plan, ids, lengths, self._dim, launch=self.launch
        )
        return vectors


def _whole(table: StoredTable) -> tuple[StoredPiece, RowType]:
    (piece,) = table.pieces
    return piece, table.kind
