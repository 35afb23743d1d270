"""The tables of a collection that share a strategy: their lookup, and the ways there and back.

Nothing here depends on the strategy: `PooledSharding` serves the pooled tables of any, and
`SequenceSharding` the unpooled ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.sharding.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    OutputColumns,
    Part,
    output_columns,
)
from tessera.training.distributed.sharding.ids import LocalSparseFeaturesDist
from tessera.training.distributed.sharding.layout import Layout
from tessera.training.distributed.sharding.pooled_vectors import LocalEmbeddingDist, in_order
from tessera.training.distributed.sharding.registry import ShardingStrategy, UnpooledDist
from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceShardingContext,
    own_vectors_stay,
)
from tessera.training.distributed.tables.grouped_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
    common_output_dtype,
)
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
)
from tessera.training.distributed.tables.table_shards import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

C = TypeVar("C", bound=Multistreamable)


class PlannedSharding(EmbeddingSharding[C, KeyedJaggedTensor, Tensor, Tensor]):
    """What pooled and unpooled tables of one strategy have in common.

    Args:
        strategy: of all of the tables.
        sharding_infos: the tables.
        env: who takes part.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Attributes:
        strategy: as given.
        layout: who holds what.

    Raises:
        ValueError: a placement that does not fit the table, the ranks or the strategy.
    """

    _keep_places = False

    def __init__(
        self,
        strategy: ShardingStrategy,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self.strategy = strategy
        self._device = device or torch.device("cpu")
        self.layout = Layout(
            sharding_infos,
            env,
            strategy.name,
            strategy.teams,
            replicated=strategy.replicated,
            splits_bags=strategy.splits_bags,
        )

    def is_local(self) -> bool:
        """Whether nothing travels, because there is nobody else."""
        return self.layout.pg is None

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel; without a process group they stay.

        Args:
            device: of the ids; None: the sharding's.
        """
        if self.layout.pg is None:
            return LocalSparseFeaturesDist()
        return self.strategy.ids(
            self.layout, self.layout.pg, device or self._device, keep_places=self._keep_places
        )

    def _groups_with(self, fused_params: dict[str, Any] | None) -> list[GroupedEmbeddingConfig]:
        """The groups here; ``fused_params``, if given, replace all ranks' groups' own."""
        if fused_params is not None:
            for groups in self.layout.groups_per_rank:
                for group in groups:
                    group.fused_params = fused_params
        return self.layout.groups_per_rank[self.layout.world.rank]

    def _output_dtype(self) -> torch.dtype:
        """Of the vectors of all ranks: what is sent and what is received is of one dtype."""
        return common_output_dtype(
            group for groups in self.layout.groups_per_rank for group in groups
        )

    def _codecs(self, operation: CommOp) -> QuantizedCommCodecs | None:
        return (self.qcomm_codecs_registry or {}).get(operation.name)

    def feature_names(self) -> list[str]:
        """The features that are sent, in order."""
        return _names(self.layout.groups_per_team())

    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""
        return [_names([groups]) for groups in self.layout.groups_per_rank]

    def output_columns(self) -> list[OutputColumns]:
        """What the columns of the output are, in order."""
        return self.layout.output_columns()

    def embedding_names(self) -> list[str]:
        """The output's names, in order; one per column shard."""
        return [columns.embedding_name for columns in self.output_columns()]

    def embedding_dims(self) -> list[int]:
        """Columns per name of `embedding_names`."""
        return [columns.width for columns in self.output_columns()]

    def embedding_names_per_rank(self) -> list[list[str]]:
        """The names that each rank's lookup makes."""
        return [
            [columns.embedding_name for columns in output_columns(groups)]
            for groups in self.layout.groups_per_rank
        ]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The shard's place in its table, per name of `embedding_names`."""
        return [
            place
            for groups in self.layout.groups_per_team()
            for group in groups
            for place in group.embedding_shard_metadata()
        ]

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of all ranks."""
        return [table for tables in self.layout.tables_per_rank for table in tables]


def _names(per_rank: Sequence[Sequence[GroupedEmbeddingConfig]]) -> list[str]:
    return [name for groups in per_rank for group in groups for name in group.feature_names()]


class PooledSharding(PlannedSharding[EmbeddingShardingContext]):
    """Pooled tables of one strategy.

    Args:
        strategy: of all of the tables.
        sharding_infos: the tables.
        env: who takes part.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        permute_embeddings: whether the output's columns come in the tables' order, the parts of
            a vector side by side; otherwise they come rank by rank.

    Raises:
        ValueError: a placement that does not fit the table, the ranks or the strategy.
    """

    def __init__(
        self,
        strategy: ShardingStrategy,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        permute_embeddings: bool = False,
    ) -> None:
        super().__init__(strategy, sharding_infos, env, device, qcomm_codecs_registry)
        self._configs = [info.embedding_config for info in sharding_infos]
        self.order = self._table_order() if permute_embeddings else None
        self._in_table_order = permute_embeddings

    def _table_order(self) -> ColumnOrder | None:
        places: dict[str, list[tuple[int, int, int, int]]] = {}
        widths = [sum(dims) for dims in self.layout.dims_per_team()]
        for team, groups in enumerate(self.layout.groups_per_team()):
            column = 0
            for part in output_columns(groups):
                where = (part.first, team, column, part.width)
                places.setdefault(part.embedding_name, []).append(where)
                column += part.width
        order = ColumnOrder(
            widths,
            [
                (team, column, width)
                for table in self._configs
                for name in table.embedding_names
                for _, team, column, width in sorted(places[name])
            ],
        )
        return None if order.is_rank_by_rank else order

    def flat_parts(self) -> list[Part]:
        """What comes rank by rank, with its feature: the order where the batch varies."""
        return [
            Part(feature, columns)
            for feature, columns in zip(self.feature_names(), self.output_columns(), strict=True)
        ]

    def output_parts(self) -> list[Part]:
        """What the columns of the output are, in order, with their features."""
        if not self._in_table_order:
            return self.flat_parts()
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

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Which rows are here.

        Args:
            device: None: the sharding's.
            fused_params: in place of the groups' own, if given.
            feature_processor: puts weights on ids.
        """
        return GroupedPooledEmbeddingsLookup(
            grouped_configs=self._groups_with(fused_params),
            device=device or self._device,
            pg=self.layout.pg,
            feature_processor=feature_processor,
            # On a replica the gradients of ids' weights are those of its own samples already.
            scale_weight_gradients=not self.strategy.replicated,
            sharding_type=self.strategy.kernels_know_it_as,
            output_dtype=self._output_dtype(),
        )

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back; without a process group they stay.

        Args:
            device: of the vectors; None: the sharding's.
        """
        if self.layout.pg is None:
            return in_order(LocalEmbeddingDist(), self.order)
        return self.strategy.pooled(
            self.layout, self.layout.pg, device or self._device, self._codecs, self.order
        )


class SequenceSharding(PlannedSharding[SequenceShardingContext]):
    """Unpooled tables of one strategy; arguments as for `PlannedSharding`.

    Raises:
        ValueError: also for blocks of one table that differ in width on one rank: an operator
            serves one width, and a table has one place in the optimizer of a rank.
    """

    _keep_places = True

    def __init__(
        self,
        strategy: ShardingStrategy,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(strategy, sharding_infos, env, device, qcomm_codecs_registry)
        for rank, tables in enumerate(self.layout.tables_per_rank):
            widths: dict[str, set[int]] = {}
            for table in tables:
                widths.setdefault(table.name, set()).add(table.local_cols)
            for name, own in widths.items():
                if len(own) > 1:
                    raise ValueError(
                        f"table {name!r}: the plan puts blocks of {sorted(own)} columns on rank "
                        f"{rank}; unpooled blocks of a table on one rank are equally wide, so cut "
                        "it evenly or place them on different ranks"
                    )

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        """Which rows are here.

        Args:
            device: None: the sharding's.
            fused_params: in place of the groups' own, if given.
            feature_processor: must be None: single vectors have no weights.
        """
        assert feature_processor is None
        return GroupedEmbeddingsLookup(
            grouped_configs=self._groups_with(fused_params),
            pg=self.layout.pg,
            device=device or self._device,
            sharding_type=self.strategy.kernels_know_it_as,
            output_dtype=self._output_dtype(),
        )

    def create_output_dist(self, device: torch.device | None = None) -> UnpooledDist:
        """How vectors travel back; without a process group they stay.

        Args:
            device: of the vectors; None: the sharding's.
        """
        if self.layout.pg is None:
            return own_vectors_stay(self.layout)
        return self.strategy.unpooled(
            self.layout, self.layout.pg, device or self._device, self._codecs
        )
