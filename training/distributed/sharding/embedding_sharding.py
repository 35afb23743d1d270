"""The tables of a collection that share a strategy: their lookup and their communication.

Nothing here depends on the strategy, which is composed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.sharding.ids import IdsDist, LocalSparseFeaturesDist
from tessera.training.distributed.sharding.interfaces import (
    BaseEmbeddingDist,
    C,
    EmbeddingShardingInfo,
    F,
    OutputColumns,
    Part,
    T,
    W,
    blocks_by_name,
)
from tessera.training.distributed.sharding.layout import LaidOut, Layout, Way, output_columns
from tessera.training.distributed.sharding.pooled_vectors import all_here
from tessera.training.distributed.sharding.registry import ShardingStrategy
from tessera.training.distributed.sharding.sequence_sharding import LocalSequenceEmbeddingDist
from tessera.training.distributed.tables.grouped_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    common_output_dtype,
)
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
)
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class EmbeddingSharding(LaidOut, Generic[C, F, T, W]):
    """The tables of one collection that share a strategy.

    Args:
        strategy: of all of the tables.
        sharding_infos: the tables.
        env: who takes part.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        is_sequence: whether each id has a vector of its own; otherwise bags are pooled.
        permute_embeddings: whether the columns of pooled vectors come in the tables' order, the
            parts of a vector side by side; otherwise they come team by team.

    Attributes:
        strategy, qcomm_codecs_registry: as given.
        layout: who holds what.
        order: the order into which received columns are put; None: they are in it already.

    Raises:
        ValueError: a placement that does not fit the table, the ranks or the strategy; also for
            unpooled blocks of one table that differ in width on one rank: an operator serves one
            width, and a table has one place in the optimizer of a rank.
    """

    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None

    def __init__(
        self,
        strategy: ShardingStrategy,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        is_sequence: bool = False,
        permute_embeddings: bool = False,
    ) -> None:
        self.strategy = strategy
        self._device = device or torch.device("cpu")
        self.qcomm_codecs_registry = qcomm_codecs_registry
        self._is_sequence, self._in_table_order = is_sequence, permute_embeddings
        self._configs = [info.embedding_config for info in sharding_infos]
        self.layout = Layout(
            sharding_infos,
            env,
            strategy.name,
            strategy.teams,
            replicated=strategy.replicated,
            splits_bags=strategy.splits_bags,
        )
        if is_sequence:
            self.layout.refuse_blocks_of_different_widths()
        self.order = self._table_order() if permute_embeddings else None

    def _table_order(self) -> ColumnOrder | None:
        columns = [output_columns(groups) for groups in self.layout.groups_per_team()]
        starts = [list(accumulate((own.width for own in team), initial=0)) for team in columns]
        names = [name for table in self._configs for name in table.embedding_names]
        order = ColumnOrder(
            [own[-1] for own in starts],
            [
                (block.source, starts[block.source][block.place], block.width)
                for blocks in blocks_by_name(names, columns)
                for block in blocks
            ],
        )
        return None if order.is_rank_by_rank else order

    def _way(self, pg: dist.ProcessGroup, device: torch.device | None) -> Way:
        codecs = self.qcomm_codecs_registry or {}
        return Way(
            layout=self.layout,
            pg=pg,
            device=device or self._device,
            codecs=lambda operation: codecs.get(operation.name),
            order=self.order,
            is_sequence=self._is_sequence,
        )

    def create_input_dist(self, device: torch.device | None = None) -> IdsDist:
        """How ids, on ``device`` or the sharding's, travel; without a process group they stay."""
        if self.layout.pg is None:
            return LocalSparseFeaturesDist()
        return self.strategy.ids(self._way(self.layout.pg, device))

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Which rows are here.

        Args:
            device: None: the sharding's.
            fused_params: in place of all groups' own, if given.
            feature_processor: puts weights on ids; None where each id has a vector of its own.
        """
        groups = [group for groups in self.layout.groups_per_rank for group in groups]
        if fused_params is not None:
            for group in groups:
                group.fused_params = fused_params
        here = self.layout.groups_per_rank[self.layout.world.rank]
        device = device or self._device
        # What is sent and what is received is of one dtype.
        dtype = common_output_dtype(groups)
        kind = self.strategy.kernels_know_it_as
        if self._is_sequence:
            assert feature_processor is None, "single vectors have no weights"
            return GroupedEmbeddingsLookup(
                here, self.layout.pg, device, sharding_type=kind, output_dtype=dtype
            )
        return GroupedPooledEmbeddingsLookup(
            here,
            device,
            self.layout.pg,
            feature_processor,
            # On a replica the gradients of ids' weights are those of its own samples already.
            scale_weight_gradients=not self.strategy.replicated,
            sharding_type=kind,
            output_dtype=dtype,
        )

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[Any, Tensor, Tensor]:
        """How vectors, on ``device`` or the sharding's, travel back, if there is a process group."""
        if self.layout.pg is None:
            if self._is_sequence:
                here = self.layout.world.rank
                return LocalSequenceEmbeddingDist(self.layout.dims_per_rank()[here])
            return all_here(self.order)
        make = self.strategy.unpooled if self._is_sequence else self.strategy.pooled
        return make(self._way(self.layout.pg, device))

    def output_parts(self) -> list[Part]:
        """What the columns of the output are, in order, with their features."""
        if not self._in_table_order:
            return self.layout.parts()
        return [
            Part(feature, OutputColumns(name, 0, table.embedding_dim))
            for table in self._configs
            for feature, name in zip(table.feature_names, table.embedding_names, strict=True)
        ]

    def embedding_names(self) -> list[str]:
        """The output's names, in order; one per column shard unless they are put together."""
        return [part.columns.embedding_name for part in self.output_parts()]

    def embedding_dims(self) -> list[int]:
        """Columns per name of `embedding_names`."""
        return [part.columns.width for part in self.output_parts()]

    def embedding_names_per_rank(self) -> list[list[str]]:
        """The names that each rank's lookup makes."""
        return [
            [columns.embedding_name for columns in output_columns(groups)]
            for groups in self.layout.groups_per_rank
        ]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The shard's place in its table, per column shard that comes team by team."""
        return [
            place
            for groups in self.layout.groups_per_team()
            for group in groups
            for place in group.embedding_shard_metadata()
        ]

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of all ranks."""
        return [table for tables in self.layout.tables_per_rank for table in tables]


TableSharding = EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Tensor]
