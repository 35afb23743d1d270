"""What a sharding answers: how ids travel, which rows are here, how vectors travel back.

A sharding serves the tables of one collection that share a strategy.  `layout` answers the second
question from the plan alone; the strategies of `registry` answer the other two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.mixins import FeatureShardingMixIn
from tessera.training.distributed.tables.interfaces import (
    BaseEmbeddingLookup,
    BaseGroupedFeatureProcessor,
)
from tessera.training.distributed.tables.table_shards import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAllTensorsAwaitable
from tessera.training.modules.embedding_configs import EmbeddingTableConfig, PoolingType
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor
from tessera.training.streamable import Multistreamable

C = TypeVar("C", bound=Multistreamable)
F = TypeVar("F", bound=Multistreamable)
T = TypeVar("T")
W = TypeVar("W")


@dataclass
class EmbeddingShardingContext(Multistreamable):
    """Batch sizes that the way back of one batch needs.

    Attributes:
        batch_size_per_rank: ``[W]`` samples of each rank.
        batch_size_per_rank_per_feature: ``[W][F_here]`` bags, where the batch varies per feature.
        batch_size_per_feature_pre_a2a: ``[F]`` bags of this rank, likewise.
        variable_batch_per_feature: whether it does.
    """

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] = field(default_factory=list)
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    variable_batch_per_feature: bool = False

    def take_exchange(self, exchange: KJTAllToAllTensorsAwaitable) -> None:
        """Learn the sizes, which the ranks have exchanged."""
        if exchange.stride_per_rank is not None:
            self.batch_size_per_rank = exchange.stride_per_rank
        else:
            ranks = len(next(iter(exchange.output_splits.values())))
            self.batch_size_per_rank_per_feature = [[] for _ in range(ranks)]

    def take_features(self, features: KeyedJaggedTensor) -> None:
        """Learn what arrived."""
        if self.variable_batch_per_feature and features.keys():
            strides_FW = features.stride_per_key_per_rank()
            self.batch_size_per_rank_per_feature = [list(s) for s in zip(*strides_FW, strict=True)]

    def record_stream(self, stream: torch.Stream) -> None:
        """Holds no tensors."""


@dataclass
class EmbeddingShardingInfo:
    """One table of a collection and where the plan puts it.

    Attributes:
        embedding_config: the table.
        param_sharding: its placement.
        param: its values ``[rows, columns]``; on the ``meta`` device it has none yet.
        fused_params: settings of its kernel.
    """

    embedding_config: EmbeddingTableConfig
    param_sharding: ParameterSharding
    param: Tensor
    fused_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class OutputColumns:
    """What some columns of a sharding's output are.

    Attributes:
        embedding_name: the output's name.
        first: the first of the table's columns.
        width: how many.
    """

    embedding_name: str
    first: int
    width: int


@dataclass(frozen=True)
class Part:
    """One name's columns in the output of one sharding.

    Attributes:
        feature: whose vectors they are.
        columns: what they are.
    """

    feature: str
    columns: OutputColumns


def _same_fused_params(table: ShardedEmbeddingTable) -> str:
    # By value: dicts have no hash, and equal ones print alike when their keys are in order.
    return repr(sorted((table.fused_params or {}).items(), key=lambda item: item[0]))


def group_tables(
    tables_per_rank: list[list[ShardedEmbeddingTable]],
) -> list[list[GroupedEmbeddingConfig]]:
    """Group each rank's shards into those that one operator can serve.

    Alike are shards of one data type, pooling, weighting, feature processing, kernel and
    settings, and of one width if they are not pooled.  Groups come in the order of their first shard.
    """
    grouped_per_rank: list[list[GroupedEmbeddingConfig]] = []
    for tables in tables_per_rank:
        groups: dict[tuple[Any, ...], list[ShardedEmbeddingTable]] = {}
        for table in tables:
            key = (
                table.data_type,
                table.pooling,
                table.is_weighted,
                table.has_feature_processor,
                table.compute_kernel,
                _same_fused_params(table),
                # Vectors that are not pooled lie in rows of one length.
                table.local_cols if table.pooling is PoolingType.NONE else None,
            )
            groups.setdefault(key, []).append(table)
        grouped_per_rank.append(
            [
                GroupedEmbeddingConfig(
                    data_type=alike[0].data_type,
                    pooling=alike[0].pooling,
                    is_weighted=alike[0].is_weighted,
                    has_feature_processor=alike[0].has_feature_processor,
                    compute_kernel=alike[0].compute_kernel,
                    embedding_tables=alike,
                    fused_params=alike[0].fused_params,
                )
                for alike in groups.values()
            ]
        )
    return grouped_per_rank


def output_columns(groups: Sequence[GroupedEmbeddingConfig]) -> list[OutputColumns]:
    """What the columns of the output of a rank's lookup are, in order."""
    return [
        OutputColumns(
            name,
            0 if table.local_metadata is None else table.local_metadata.shard_offsets[1],
            table.local_cols,
        )
        for group in groups
        for table in group.embedding_tables
        for name in table.embedding_names
    ]


class BaseSparseFeaturesDist(ABC, nn.Module, Generic[F]):
    """How ids travel: each rank's own samples to the ranks that hold the rows."""

    @abstractmethod
    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[F]]:
        """Begin; the first wait ends the exchange of sizes, the second that of ids."""


class BaseEmbeddingDist(ABC, nn.Module, Generic[C, T, W]):
    """How vectors travel back to the ranks whose samples they are of."""

    @abstractmethod
    def forward(self, local_embs: T, sharding_ctx: C | None = None) -> Awaitable[W]:
        """Begin; the wait gives the vectors of this rank's samples."""


class EmbeddingSharding(FeatureShardingMixIn, Generic[C, F, T, W]):
    """One sharding type, for the tables of one collection that have it.

    Args:
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @property
    def qcomm_codecs_registry(self) -> dict[str, QuantizedCommCodecs] | None:
        """How vectors are written for the network, by `CommOp` name."""
        return self._qcomm_codecs_registry

    @abstractmethod
    def create_input_dist(self, device: torch.device | None = None) -> BaseSparseFeaturesDist[F]:
        """How ids travel."""

    @abstractmethod
    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> BaseEmbeddingLookup[F, T]:
        """Which rows are here."""

    @abstractmethod
    def create_output_dist(self, device: torch.device | None = None) -> BaseEmbeddingDist[C, T, W]:
        """How vectors travel back."""

    @abstractmethod
    def embedding_dims(self) -> list[int]:
        """Columns per name of `embedding_names`."""

    @abstractmethod
    def embedding_names(self) -> list[str]:
        """The output's names, in the output's order; one per column shard."""

    @abstractmethod
    def embedding_names_per_rank(self) -> list[list[str]]:
        """The names that each rank's lookup makes."""

    @abstractmethod
    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """The shard's place in its table, per name of `embedding_names`."""

    @abstractmethod
    def embedding_tables(self) -> list[ShardedEmbeddingTable]:
        """The shards of all ranks."""

    @abstractmethod
    def output_columns(self) -> list[OutputColumns]:
        """What the columns of the output are, in order."""
