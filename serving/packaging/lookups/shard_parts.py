"""What the lookups of tables in shards are made of.

All tensors of shard ``k`` lie in a submodule whose name begins with ``tessera_shard_`` and ``k``, by which a loader
knows them (`tessera.serving.package.devices`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from tessera.kernels.ops import launch_hint
from tessera.kernels.plan import IdRule, OutOfRange
from tessera.kernels.tables import FeatureLookup, make_plan
from tessera.serving.package.schema import FeatureSpec
from tessera.serving.packaging.lookups.tessera_plan import POOLINGS, table_place
from tessera.serving.packaging.stable_names import named_in_packages
from tessera.serving.packaging.tables.stored import StoredPiece, StoredTable


@named_in_packages("shard_parts")
def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` on the device of ``other``."""
    return tensor.to(other.device, non_blocking=True)


@named_in_packages("shard_parts")
def shifted(rows: Tensor, lengths: Tensor, begins: Tensor) -> Tensor:
    """Rows ``[N]``, feature-major, counted from a shard's first one.

    ``lengths`` are ``[F * B]``; ``begins`` ``[F]`` int64, the shard's first row of each table.
    """
    counts = lengths.view(begins.size(0), -1).sum(dim=1)
    return rows - torch.repeat_interleave(begins, counts, output_size=rows.size(0))


Rows = TypeVar("Rows", bound="ShardRows")


class ShardRows(nn.Module):
    """What one shard holds: its buffer, under a name that tells the shard."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", rows)


class PlannedRows(ShardRows):
    """A buffer of stored rows, read where it is, and what the operator is to look up in it.

    ``features`` stand in the order of the ids.
    """

    def __init__(self, rows: Tensor, features: Sequence[FeatureLookup], *, for_gpu: bool) -> None:
        super().__init__(rows)
        plan = make_plan(features)
        self.launch = launch_hint(plan, shares=for_gpu)
        self.plan: Tensor
        self.register_buffer("plan", plan)


class Shard(PlannedRows):
    """What one shard holds for a lookup.

    ``begins`` are the first rows of the features' tables that are here, where ids are counted from
    them.
    """

    def __init__(
        self,
        rows: Tensor,
        features: Sequence[FeatureLookup],
        begins: Sequence[int] = (),
        *,
        for_gpu: bool,
    ) -> None:
        super().__init__(rows, features, for_gpu=for_gpu)
        self.begins: Tensor
        self.register_buffer("begins", torch.tensor(begins, dtype=torch.int64))


def shard_in(module: nn.Module, name: str, kind: type[Rows]) -> Rows:
    """The shard that is submodule ``name``."""
    shard = module.get_submodule(name)
    assert isinstance(shard, kind)
    return shard


def is_cut_by_rows(table: StoredTable) -> bool:
    """Whether some piece of the table has not all its rows."""
    piece = table.pieces[0]
    return len(table.pieces) > 1 and piece.rows != table.info.rows


def piece_in(table: StoredTable, shard: int) -> StoredPiece | None:
    """The piece of the table that a shard has, if any."""
    return next((piece for piece in table.pieces if piece.placement.shard == shard), None)


def partial_lookup(
    feature: FeatureSpec, table: StoredTable, piece: StoredPiece, columns: Mapping[str, int]
) -> FeatureLookup:
    """A piece's share of a sum: a row that it has not counts as zeros."""
    return FeatureLookup(
        table=table_place(feature.table, piece, table.kind),
        out_column=columns[feature.name],
        pooling=POOLINGS[feature.pooling],
        id_rule=IdRule.NONE,
        out_of_range=OutOfRange.ZERO,
    )
