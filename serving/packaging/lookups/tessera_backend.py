"""Tessera's own operators behind `tessera.serving.packaging.lookups.backends.LookupBackend`.

One call hashes the ids, keeps them inside their tables, looks up and pools all features, and
writes each vector to its place in the output, in an order of a sample's own, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tessera.kernels.ops import launch_hint
from tessera.kernels.row_types import ROW_TYPES, RowType
from tessera.kernels.tables import make_plan
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.dense_types import DENSE_TYPES
from tessera.serving.packaging.lookups.sharded_lookup import ShardedLookup
from tessera.serving.packaging.lookups.sharded_rows import ShardedRows
from tessera.serving.packaging.lookups.tessera_plan import columns_of, feature_lookup, skipped
from tessera.serving.packaging.tables.stored import StoredPiece, StoredTable, StoredTables


class TesseraBackend:
    """The operators ``torch.ops.tessera.*`` (`tessera.kernels.ops`)."""

    name: str = "tessera"
    operator_libraries: tuple[str, ...] = ("tessera_ops",)
    weight_types: frozenset[str] = frozenset(
        name for name, kind in ROW_TYPES.items() if "tessera" in kind.backends
    )
    dense_types: tuple[str, ...] = tuple(DENSE_TYPES)

    def lookup(
        self, tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
    ) -> nn.Module:
        """See `LookupBackend.lookup`."""
        if len(tables.buffers) > 1:
            return ShardedLookup(tables, features, names)
        return TesseraLookup(tables, features, names)

    def lookup_rows(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> nn.Module:
        """See `LookupBackend.lookup_rows`."""
        if len(tables.buffers) > 1:
            return ShardedRows(tables, features)
        return TesseraRows(tables, features)


class TesseraLookup(nn.Module):
    """One call of ``tessera::lookup`` for everything between raw ids and pooled vectors.

    Args:
        tables: the stored rows, read where they are; all in one shard.
        features: in the order of the ids; None: ids to leave out.
        names: the same features in the order of the output's columns.

    Raises:
        UserError: a table of more than `MAX_ROWS` rows.
    """

    def __init__(
        self, tables: StoredTables, features: Sequence[FeatureSpec | None], names: Sequence[str]
    ) -> None:
        super().__init__()
        columns = columns_of(features, names)
        self._used = sum(feature.dim for feature in features if feature is not None)
        # What is left out is written, as one column of nothing, behind the others.
        self._width = self._used + (1 if None in features else 0)
        plan = make_plan(
            [
                skipped(self._used)
                if feature is None
                else feature_lookup(
                    feature, _whole(tables.table(feature.table)), columns[feature.name]
                )
                for feature in features
            ]
        )
        self._launch = launch_hint(plan, shares=tables.for_gpu)
        self.rows: Tensor
        self.plan: Tensor
        self.register_buffer("rows", tables.buffers[0])
        self.register_buffer("plan", plan)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """See `LookupBackend.lookup`."""
        pooled: Tensor = torch.ops.tessera.lookup(
            self.rows, self.plan, ids, lengths, self._width, weights, launch=self._launch
        )
        return pooled if self._width == self._used else pooled.narrow(1, 0, self._used)


class TesseraRows(nn.Module):
    """One call of ``tessera::lookup_rows`` between raw ids and their vectors.

    Args:
        tables: the stored rows, read where they are; all in one shard.
        features: in the order of the ids; all of one dimension.

    Raises:
        UserError: a table of more than `MAX_ROWS` rows.
    """

    def __init__(self, tables: StoredTables, features: Sequence[FeatureSpec]) -> None:
        super().__init__()
        self._dim = features[0].dim
        plan = make_plan([feature_lookup(f, _whole(tables.table(f.table)), 0) for f in features])
        self._launch = launch_hint(plan, shares=tables.for_gpu)
        self.rows: Tensor
        self.plan: Tensor
        self.register_buffer("rows", tables.buffers[0])
        self.register_buffer("plan", plan)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """See `LookupBackend.lookup_rows`."""
        vectors: Tensor = torch.ops.tessera.lookup_rows(
            self.rows, self.plan, ids, lengths, self._dim, launch=self._launch
        )
        return vectors


def _whole(table: StoredTable) -> tuple[StoredPiece, RowType]:
    (piece,) = table.pieces
    return piece, table.kind
