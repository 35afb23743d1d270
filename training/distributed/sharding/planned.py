"""What all sharding types share: everything that follows from the plan alone.

Legend: ``W`` ranks, ``L`` ranks per node, ``B`` samples of this rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from tessera.training.distributed.comm.awaitable import Awaitable, NoWait
from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.sharding.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    OutputColumns,
    Part,
    group_tables,
    output_columns,
    tables_on_ranks,
)
from tessera.training.distributed.tables.grouped_lookup import (
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
T = TypeVar("T")
W = TypeVar("W")


class LocalSparseFeaturesDist(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """Ids stay: every row that they need is here."""

    def forward(
        self, sparse_features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """The features as they are."""
        return NoWait(NoWait(sparse_features))


class LocalEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Vectors stay: they are of this rank's own samples."""

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """The vectors as they are."""
        del sharding_ctx
        return NoWait(local_embs)


class PermutedEmbeddingDist(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):
    """Vectors that travel back, their columns put in another order when they have arrived.

    Args:
        dist: how they travel.
        order: of the columns.
    """

    def __init__(
        self,
        dist: BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor],
        order: ColumnOrder,
    ) -> None:
        super().__init__()
        self._dist = dist
        self._order = order

    def forward(
        self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext | None = None
    ) -> Awaitable[Tensor]:
        """Begin to send; the wait gives ``[B, all columns]``.

        Where the batch varies per feature there are no columns yet, and nothing is permuted.
        """
        awaitable: Awaitable[Tensor] = self._dist(local_embs, sharding_ctx)
        if sharding_ctx is None or not sharding_ctx.variable_batch_per_feature:
            awaitable.callbacks.append(self._order.permute)
        return awaitable


def in_order(
    dist: BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor], order: ColumnOrder | None
) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
    """``dist`` whose columns come in ``order``; None: as they do."""
    return dist if order is None else PermutedEmbeddingDist(dist, order)


class PlannedSharding(EmbeddingSharding[C, KeyedJaggedTensor, T, W]):
    """A sharding whose ranks hold what `tables_on_ranks` says.

    Ranks that look up the same features (for other rows) send one result together; ``senders``
    holds the first of each such set of ranks.  The output's columns are the senders', one after
    the other, and so are the features that are sent.

    Args:
        sharding_infos: the tables.
        env: who takes part.
        device: where this rank computes.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: a placement that does not fit the table or the ranks.
    """

    sharding_type: ShardingType

    def __init__(
        self,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._env = env
        self._pg: dist.ProcessGroup | None = env.process_group
        self._rank = env.rank
        self._world_size = env.world_size
        self._device = device or torch.device("cpu")
        self._tables_per_rank = tables_on_ranks(sharding_infos, env.world_size)
        self._groups_per_rank = group_tables(self._tables_per_rank)
        self._check_plan()

    def _check_plan(self) -> None:
        """Refuse placements that this type cannot serve."""

    def senders(self) -> list[int]:
        """See the class."""
        return list(range(self._world_size))

    def is_local(self) -> bool:
        """Whether nothing travels, because there is nobody else."""
        return self._pg is None

    def groups_here(self) -> list[GroupedEmbeddingConfig]:
        """The groups of this rank."""
        return self._groups_per_rank[self._rank]

    def groups_per_sender(self) -> list[list[GroupedEmbeddingConfig]]:
        """The groups of each of `senders`."""
        return [self._groups_per_rank[rank] for rank in self.senders()]

    def create_input_dist(
        self, device: torch.device | None = None
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel; without a process group they stay.

        Args:
            device: of the ids; None: the sharding's.
        """
        if self._pg is None:
            return LocalSparseFeaturesDist()
        return self._input_dist(self._pg, device or self._device)

    @abstractmethod
    def _input_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseSparseFeaturesDist[KeyedJaggedTensor]:
        """How ids travel among ``pg``."""

    def _groups_with(self, fused_params: dict[str, Any] | None) -> list[GroupedEmbeddingConfig]:
        """`groups_here`; ``fused_params``, if given, take the place of all ranks' groups' own."""
        if fused_params is not None:
            for groups in self._groups_per_rank:
                for group in groups:
                    group.fused_params = fused_params
        return self.groups_here()

    def _output_dtype(self) -> torch.dtype:
        """Of the vectors of all ranks: what is sent and what is received is of one dtype."""
        return common_output_dtype(group for groups in self._groups_per_rank for group in groups)

    def _codecs(self, operation: CommOp) -> QuantizedCommCodecs | None:
        return (self.qcomm_codecs_registry or {}).get(operation.name)

    def feature_names(self) -> list[str]:
        """The features that are sent, in order."""
        return [
            name
            for groups in self.groups_per_sender()
            for group in groups
            for name in group.feature_names()
        ]

    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""
        return [
            [name for group in groups for name in group.feature_names()]
            for groups in self._groups_per_rank
        ]

    def features_per_sender(self) -> list[int]:
        """How many features each of `senders` looks up."""
        return [
            sum(group.num_features() for group in groups) for groups in self.groups_per_sender()
        ]

    def dims_per_sender(self) -> list[list[int]]:
        """Columns of each feature that each of `senders` looks up."""
        return [
            [dim for group in groups for dim in group.embedding_dims()]
            for groups in self.groups_per_sender()
        ]

    def output_columns(self) -> list[OutputColumns]:
        """What the columns of the output are, in order."""
        return [
            columns for groups in self.groups_per_sender() for columns in output_columns(groups)
        ]

    def embedding_names(self) -> list[str]:
        """The output's names, in order; one per column shard."""
        return [columns.embedding_name for columns in self.output_columns()]

    def embedding_dims(self) -> list[int]:
        """Columns per name of `embedding_names`."""
        return [columns.width for columns in self.output_columns()]

    def embedding_names_per_rank(self) -> list[list[str]]:
        """The names that each rank's lookup makes."""
        return [
            [name for group in groups for name in group.embedding_names()]
            for groups in self._groups_per_rank
        ]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The shard's place in its table, per name of `embedding_names`."""
        return [
            place
            for groups in self.groups_per_sender()
            for group in groups
            for place in group.embedding_shard_metadata()
        ]

    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of all ranks."""
        return [table for tables in self._tables_per_rank for table in tables]

    def row_bounds_per_feature(self, ranks: Sequence[int]) -> list[list[int]]:
        """For each feature that ``ranks`` look up together: where each one's rows begin, the end.

        Raises:
            ValueError: the ranks do not hold successive rows of the same columns.
        """
        bounds: list[list[int]] = []
        shards_per_rank = [
            [table for group in self._groups_per_rank[rank] for table in group.embedding_tables]
            for rank in ranks
        ]
        if len({len(shards) for shards in shards_per_rank}) > 1:
            names = sorted({table.name for tables in shards_per_rank for table in tables})
            raise ValueError(
                f"tables {names} are {self.sharding_type.value}: ranks {list(ranks)} must each "
                "hold one block of rows of each (which may be empty)"
            )
        for shards in zip(*shards_per_rank, strict=True):
            places = [table.local_metadata for table in shards]
            starts = [place.shard_offsets[0] for place in places if place is not None]
            ends = [
                place.shard_offsets[0] + place.shard_sizes[0]
                for place in places
                if place is not None
            ]
            alike = len({(table.name, table.local_cols) for table in shards}) == 1
            if not alike or starts != [0, *ends[:-1]] or ends[-1] != shards[0].num_embeddings:
                raise ValueError(
                    f"table {shards[0].name!r} is {self.sharding_type.value}: ranks {list(ranks)} "
                    f"must hold successive blocks of rows, but they begin at {starts}"
                )
            bounds += [[*starts, ends[-1]]] * shards[0].num_features()
        return bounds


class PooledSharding(PlannedSharding[EmbeddingShardingContext, Tensor, Tensor]):
    """A `PlannedSharding` of pooled tables.

    Args:
        sharding_infos: the tables.
        env: who takes part.
        device: where this rank computes.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        permute_embeddings: whether the output's columns come in the tables' order, the parts of
            a vector side by side; otherwise they come rank by rank.

    Raises:
        ValueError: a placement that does not fit the table or the ranks.
    """

    scale_weight_gradients = True

    def __init__(
        self,
        sharding_infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        permute_embeddings: bool = False,
    ) -> None:
        super().__init__(sharding_infos, env, device, qcomm_codecs_registry)
        self._configs = [info.embedding_config for info in sharding_infos]
        self.order = self._table_order() if permute_embeddings else None
        self._in_table_order = permute_embeddings

    def _table_order(self) -> ColumnOrder | None:
        places: dict[str, list[tuple[int, int, int, int]]] = {}
        widths = [sum(dims) for dims in self.dims_per_sender()]
        for sender, groups in enumerate(self.groups_per_sender()):
            column = 0
            for part in output_columns(groups):
                where = (part.first, sender, column, part.width)
                places.setdefault(part.embedding_name, []).append(where)
                column += part.width
        order = ColumnOrder(
            widths,
            [
                (sender, column, width)
                for table in self._configs
                for name in table.embedding_names
                for _, sender, column, width in sorted(places[name])
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

    def create_output_dist(
        self, device: torch.device | None = None
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back; without a process group they stay.

        Args:
            device: of the vectors; None: the sharding's.
        """
        if self._pg is None:
            return in_order(LocalEmbeddingDist(), self.order)
        return self._output_dist(self._pg, device or self._device)

    @abstractmethod
    def _output_dist(
        self, pg: dist.ProcessGroup, device: torch.device
    ) -> BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]:
        """How vectors travel back among ``pg``, their columns in `order` (None: rank by rank)."""

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
            pg=self._pg,
            feature_processor=feature_processor,
            scale_weight_gradients=self.scale_weight_gradients,
            sharding_type=self.sharding_type,
            output_dtype=self._output_dtype(),
        )
