"""Which part of a quantized table each device holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import rank_device
from tessera.training.distributed.plan.plan_types import ParameterSharding, ShardingType
from tessera.training.distributed.plan.shard_sizes import (
    column_blocks,
    even_rows,
    row_blocks,
)
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from tessera.training.quant.rows import STORED_TYPES


@dataclass(frozen=True, kw_only=True)
class InferShard:
    """A block of a table on one device.

    Attributes:
        rank: the device's place.
        row: the first row.
        rows: how many.
        column: the first column.
        columns: how many.
    """

    rank: int
    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class InferTable:
    """A quantized table and where it goes.

    Attributes:
        config: the table; its ``data_type`` says how it is stored.
        shards: its blocks, by first column or first row.
        is_weighted: ids carry weights.
    """

    config: BaseEmbeddingConfig
    shards: list[InferShard]
    is_weighted: bool


def shards_of(
    config: BaseEmbeddingConfig, placement: ParameterSharding, world_size: int
) -> list[InferShard]:
    """The blocks that a plan makes of a table.

    Raises:
        UserError: a rank outside the world, or column-wise without ranks.
    """
    spec = placement.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        blocks = [(s.shard_sizes, s.shard_offsets, _rank_of(s)) for s in spec.shards]
    else:
        blocks = _cut(config, placement, world_size)
    shards = [
        InferShard(rank=rank, row=first[0], rows=size[0], column=first[1], columns=size[1])
        for size, first, rank in blocks
    ]
    wrong = [shard.rank for shard in shards if not 0 <= shard.rank < world_size]
    if wrong:
        raise UserError(
            f"table {config.name!r} is placed on rank {wrong[0]}, but there are {world_size} "
            "devices; give ShardingEnv.from_local as many as the plan uses"
        )
    return sorted(shards, key=lambda shard: (shard.column, shard.row))


def _rank_of(shard: ShardMetadata) -> int:
    placement: Any = shard.placement
    return int(placement.rank())


def _cut(
    config: BaseEmbeddingConfig, placement: ParameterSharding, world_size: int
) -> list[tuple[list[int], list[int], int]]:
    rows, columns = config.num_embeddings, config.embedding_dim
    kind, ranks = placement.sharding_type, placement.ranks
    if kind == ShardingType.TABLE_WISE.value:
        return [([rows, columns], [0, 0], ranks[0] if ranks else 0)]
    if kind == ShardingType.ROW_WISE.value:
        blocks = row_blocks(even_rows(rows, world_size), columns)
        return [(size, offset, rank) for rank, (size, offset) in enumerate(blocks)]
    if kind == ShardingType.COLUMN_WISE.value:
        if not ranks:
            raise UserError(f"table {config.name!r} is column_wise without ranks; give one a shard")
        if columns % len(ranks):
            raise UserError(
                f"table {config.name!r} has {columns} columns, which {len(ranks)} ranks do not "
                "divide; give other ranks, or a sharding_spec"
            )
        width = columns // len(ranks)
        blocks = column_blocks(rows, [width] * len(ranks))
        return [(size, offset, rank) for (size, offset), rank in zip(blocks, ranks, strict=True)]
    raise UserError(
        f"table {config.name!r}: sharding_type is {kind!r}; quantized tables are sharded "
        "table_wise, row_wise or column_wise"
    )


def local_config(
    tables: list[InferTable], rank: int, device_type: str
) -> tuple[GroupedEmbeddingConfig, list[tuple[InferTable, InferShard]]]:
    """What one device looks up, and which block of which table each shard is."""
    own = [(table, shard) for table in tables for shard in table.shards if shard.rank == rank]
    config = GroupedEmbeddingConfig(
        data_type=tables[0].config.data_type,
        pooling=PoolingType.SUM,
        is_weighted=tables[0].is_weighted,
        has_feature_processor=False,
        compute_kernel=EmbeddingComputeKernel.QUANT,
        embedding_tables=[
            _local_table(table, shard, rank_device(device_type, rank)) for table, shard in own
        ],
    )
    return config, own


def _local_table(
    table: InferTable, shard: InferShard, device: torch.device
) -> ShardedEmbeddingTable:
    config = table.config
    return ShardedEmbeddingTable(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        pooling=PoolingType.SUM,
        is_weighted=table.is_weighted,
        compute_kernel=EmbeddingComputeKernel.QUANT,
        local_rows=shard.rows,
        local_cols=shard.columns,
        local_metadata=ShardMetadata(
            shard_offsets=[shard.row, shard.column],
            shard_sizes=[shard.rows, shard.columns],
            placement=f"rank:{shard.rank}/{device}",
        ),
    )


def copy_block(table: BaseEmbeddingConfig, shard: InferShard, stored: Tensor, out: Tensor) -> None:
    """Copy a block of a table's ``stored`` rows into ``out``, both ``[rows, row bytes]`` uint8.

    Every column block keeps the scale and bias of the whole row, so that all devices together
    give the same numbers as one.

    Raises:
        UserError: the block begins inside a byte.
    """
    if stored.is_meta or out.is_meta:
        return
    kind = STORED_TYPES[table.data_type]
    if shard.column * kind.bits % 8 or shard.columns * kind.bits % 8:
        raise UserError(
            f"table {table.name!r}: columns {shard.column} to "
            f"{shard.column + shard.columns} are not whole bytes of {table.data_type.value}"
        )
    rows = stored[shard.row : shard.row + shard.rows]
    own = kind.take_columns(rows, shard.column, shard.column + shard.columns)
    out[:, : own.size(1)] = own


def row_bounds(table: InferTable, world_size: int) -> list[int]:
    """``W + 1`` rows at which the devices' blocks of a row-wise table begin and end.

    Raises:
        UserError: the blocks are not in the devices' order.
    """
    bounds = [0] * (world_size + 1)
    for shard in table.shards:
        bounds[shard.rank + 1] = shard.rows
    for rank in range(world_size):
        bounds[rank + 1] += bounds[rank]
    for shard in table.shards:
        if shard.rows and bounds[shard.rank] != shard.row:
            raise UserError(
                f"table {table.config.name!r}: its row blocks are not in the order of their ranks; "
                "give them so"
            )
    assert all(start <= stop for start, stop in pairwise(bounds))
    return bounds
