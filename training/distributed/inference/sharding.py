"""Quantized tables of one strategy on the devices of one process.

The strategy's record says which device holds what (`Layout`); ids and vectors are copied from device to
device instead of sent.  Everything is traced by torch.fx.

Legend: ``W`` devices, ``B`` samples, ``D`` columns, ``N`` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv, rank_device
from tessera.training.distributed.inference.lookup import (
    InferGroupedEmbeddingsLookup,
    InferGroupedLookupMixin,
    InferGroupedPooledEmbeddingsLookup,
)
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.layout import LaidOut, Layout, group_of
from tessera.training.distributed.sharding.registry import ShardingStrategy
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.distributed.travel.one_to_all import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from tessera.training.fbgemm import load_sparse_operators
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.quant.lookup import StoredPart, checked_ids
from tessera.training.quant.rows import STORED_TYPES
from tessera.training.sparse import selection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor

Route = tuple[KeyedJaggedTensor, Tensor] | None
"""Ids that were sorted, as they were before, and ``[N]`` where each went; None: they were not sorted."""


class InferSharding(nn.Module, LaidOut):
    """Tables of one strategy on the devices of this process.

    Each device gets the features of the tables of which it holds columns.  Where the strategy
    splits bags, ids are sorted by the device that holds their row; pooled vectors are then
    added up, and unpooled ones put back in their ids' places.

    Args:
        strategy: of all of the tables.
        infos: the tables and their listed shards; ``param`` holds the stored rows
            ``[rows, row bytes]`` uint8, which are copied.
        env: how many devices.
        device: the devices' type.
        pooled: whether the vectors of a bag are added up.

    Attributes:
        layout: which device holds what; the ranks are the devices.
    """

    def __init__(
        self,
        strategy: ShardingStrategy,
        infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device,
        *,
        pooled: bool,
    ) -> None:
        super().__init__()
        self.layout = Layout(
            infos,
            env,
            strategy.name,
            strategy.teams,
            replicated=False,
            splits_bags=strategy.splits_bags,
            group=_one_operator_each,
        )
        devices = [rank_device(device.type, rank) for rank in range(env.world_size)]
        self.output_device = devices[0]
        kind = InferGroupedPooledEmbeddingsLookup if pooled else InferGroupedEmbeddingsLookup
        self._lookup: InferGroupedLookupMixin = kind(
            self.layout.groups_per_rank,
            env.world_size,
            infos[0].fused_params if infos else None,
            device,
        )
        tables = {info.embedding_config.name: info for info in infos}
        for block in self.blocks():
            _copy_block(tables[block.table], block)
        self._sent = self.feature_names()
        counts = self.features_per_rank()
        self._one_to_all = KJTOneToAll(counts, env.world_size, device)
        self._busy = [rank for rank, count in enumerate(counts) if count]
        self._all_to_one = SeqEmbeddingsAllToOne(devices[0], env.world_size)
        self._splits_bags, self._pooled = strategy.splits_bags, pooled
        if not self._splits_bags:
            self._merge: nn.Module = EmbeddingsAllToOne(devices[0], len(self._busy), 1)
            return
        self._merge = (
            EmbeddingsAllToOneReduce(devices[0], env.world_size)
            if pooled
            else EmbeddingsAllToOne(devices[0], env.world_size, 0)
        )
        load_sparse_operators()
        self._block_sizes = torch.tensor([max(bounds[1], 1) for bounds in self.layout.row_bounds])
        self._row_bounds = [torch.tensor(bounds) for bounds in self.layout.row_bounds]
        self._row_counts = torch.tensor([bounds[-1] for bounds in self.layout.row_bounds])
        self._warnings = torch.zeros(1, dtype=torch.int64)

    def lookup(self) -> InferGroupedLookupMixin:
        """The lookups of all devices."""
        return self._lookup

    def blocks(self) -> list[StoredPart]:
        """What is stored, device by device."""
        return [
            StoredPart(
                table=table.name,
                device=rank,
                row=place.shard_offsets[0],
                column=place.shard_offsets[1],
                columns=table.local_cols,
                rows=rows,
            )
            for rank, (lookup, tables) in enumerate(
                zip(self._lookup.lookups(), self.layout.tables_per_rank, strict=True)
            )
            for table, rows in zip(tables, lookup.rows.tables(), strict=True)
            if (place := table.local_metadata) is not None
        ]

    def input_dist(self, features: KeyedJaggedTensor) -> tuple[KJTList, Route]:
        """Each device's features, ids counted from its first row, and where each id went."""
        own = selection.select_features(features, self._sent)
        if not self._splits_bags:
            return self._one_to_all(own), None
        by_block = sort_by_block(
            own,
            self._block_sizes,
            self._row_bounds,
            self.layout.world.size,
            not self._pooled,
            self._row_counts,
            self._warnings,
        )
        return self._one_to_all(by_block[0]), None if self._pooled else (own, by_block[1])

    def merged(self, outputs: list[Tensor]) -> Tensor:
        """The pooled vectors of all devices on the first, with the columns of ``layout.parts()``."""
        whole: Tensor = self._merge(
            outputs if self._splits_bags else [outputs[rank] for rank in self._busy]
        )
        return whole

    def unpooled_vectors(
        self, dist_input: KJTList, route: Route, outputs: list[Tensor]
    ) -> list[tuple[Tensor, list[int]]]:
        """For each team its vectors ``[N, D]`` on the first device, and where each feature begins."""
        if route is not None:
            own, places = route
            vectors = self._merge(outputs)
            if self.output_device.type != "cpu":
                places = places.to(self.output_device, non_blocking=True)
            return [(vectors.index_select(0, places), own.offset_per_key())]
        moved = self._all_to_one(outputs)
        return [
            (moved[rank], dist_input[rank].offset_per_key() if rank in self._busy else [])
            for rank in range(self.layout.world.size)
        ]


def _one_operator_each(
    tables_per_rank: list[list[ShardedEmbeddingTable]],
) -> list[list[GroupedEmbeddingConfig]]:
    """Quantized tables of all types and widths share the one operator of their device."""
    shared: dict[str, Any] = {
        "pooling": PoolingType.SUM,
        "compute_kernel": EmbeddingComputeKernel.QUANT,
    }
    return [[replace(group_of(own), **shared)] if own else [] for own in tables_per_rank]


def _copy_block(info: EmbeddingShardingInfo, block: StoredPart) -> None:
    # Every column block keeps the scale and bias of the whole row, so that all devices together
    # give the same numbers as one.
    if info.param.is_meta or block.rows.is_meta:
        return
    kind, stop = STORED_TYPES[info.embedding_config.data_type], block.column + block.columns
    if block.column * kind.bits % 8 or block.columns * kind.bits % 8:
        raise UserError(
            f"table {block.table!r}: columns {block.column} to {stop} are not whole bytes of "
            f"{info.embedding_config.data_type.value}"
        )
    rows = info.param[block.row : block.row + len(block.rows)]
    own = kind.take_columns(rows, block.column, stop)
    block.rows[:, : own.size(1)] = own


def sort_by_block(  # noqa: PLR0917 - TorchScript calls it by position
    features: KeyedJaggedTensor,
    block_sizes: Tensor,
    row_bounds: list[Tensor],
    blocks: int,
    places: bool,  # noqa: FBT001 - TorchScript calls it by position
    row_counts: Tensor,
    warnings: Tensor,
) -> tuple[KeyedJaggedTensor, Tensor]:
    """Sort the ids by block of rows in one step of a traced graph; within a block they keep order.

    Args:
        features: the ids.
        block_sizes: ``[F]`` int64, rows of each feature's first block.
        row_bounds: per feature ``[blocks + 1]`` int64: where each block begins, and the end.
        blocks: how many.
        places: whether to work out where each id went.
        row_counts: ``[F]`` int64, rows of each feature's table.
        warnings: ``[1]`` int64, counts the ids that are not rows.

    Returns:
        ``blocks * F`` keys, block by block, each id counted from its block's first row; and
        ``[N]`` int64, each id's place there (empty unless asked for).
    """
    raw, lengths = features.values().long(), features.lengths().long()
    device = raw.device
    # An id that is not a row becomes row 0 here, where the whole table's size is known.
    ids = checked_ids(row_counts.to(device), raw, features.offsets().long(), warnings.to(device))[0]
    lengths_of_blocks, local_ids, weights, _positions, went = (
        torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            ids,
            False,
            places,
            block_sizes.to(device),
            blocks,
            features.weights_or_none(),
            None,
            -1,
            [bounds.to(device) for bounds in row_bounds],
        )
    )
    # The operator reads -1, which is not an id, as the largest number there is.
    local_ids = local_ids.masked_fill(local_ids > 1 << 40, -1)
    keys: list[str] = []
    for _block in range(blocks):
        keys.extend(features.keys())
    # A key stands there once per block: split by place, not by name.
    by_block = KeyedJaggedTensor(
        keys,
        local_ids,
        weights=weights,
        lengths=lengths_of_blocks,
        stride=features.stride(),
        validate=False,
    )
    return by_block, ids[:0] if went is None else went


torch.fx.wrap("sort_by_block")
