"""What the parts of a sharding give one another, and the base classes of its communication.

Legend: ``W`` ranks, ``F`` features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from typing_extensions import Self

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.travel.kjt_all_to_all import KJTAllToAllTensorsAwaitable
from tessera.training.modules.embedding_configs import EmbeddingTableConfig
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
        batch_size_per_feature_pre_a2a: ``[F]`` bags of this rank, where the batch varies per
            feature.
        variable_batch_per_feature: whether the batch varies per feature.
    """

    batch_size_per_rank: list[int] = field(default_factory=list)
    batch_size_per_rank_per_feature: list[list[int]] = field(default_factory=list)
    batch_size_per_feature_pre_a2a: list[int] = field(default_factory=list)
    variable_batch_per_feature: bool = False

    @classmethod
    def of(cls, sent: KeyedJaggedTensor, dist: nn.Module) -> Self:
        """The context of features that ``dist`` has begun to send."""
        del dist
        varies = sent.variable_stride_per_key()
        return cls(
            batch_size_per_feature_pre_a2a=sent.stride_per_key() if varies else [],
            variable_batch_per_feature=varies,
        )

    def take_exchange(self, exchange: KJTAllToAllTensorsAwaitable) -> None:
        """Learn the sizes that the ranks have exchanged."""
        if exchange.stride_per_rank is not None:
            self.batch_size_per_rank = exchange.stride_per_rank
        else:
            ranks = len(next(iter(exchange.output_splits.values())))
            self.batch_size_per_rank_per_feature = [[] for _ in range(ranks)]

    def take_features(self, features: KeyedJaggedTensor) -> None:
        """Learn the batch sizes of the features that were received."""
        if self.variable_batch_per_feature and features.keys():
            strides_FW = features.stride_per_key_per_rank()
            self.batch_size_per_rank_per_feature = [list(s) for s in zip(*strides_FW, strict=True)]


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
    """What some columns of a sharding's output are."""

    embedding_name: str
    first: int  # of the table's columns
    width: int


@dataclass(frozen=True)
class Part:
    """One name's columns in the output of one sharding, and the feature that they are of."""

    feature: str
    columns: OutputColumns


@dataclass(frozen=True)
class Block:
    """Where some columns of a named vector are."""

    first: int  # of the table's columns
    source: int  # place of the output that holds them
    place: int  # in that output
    width: int


def blocks_by_name(
    names: Sequence[str], columns_per_source: Sequence[Sequence[OutputColumns]]
) -> list[list[Block]]:
    """For each of ``names`` the blocks of its columns among some outputs, from left to right."""
    found: dict[str, list[Block]] = {name: [] for name in names}
    for source, columns in enumerate(columns_per_source):
        for place, own in enumerate(columns):
            found[own.embedding_name].append(Block(own.first, source, place, own.width))
    return [sorted(found[name], key=lambda block: block.first) for name in names]


class FeatureShardingMixIn(ABC):
    """What a sharding says about its features."""

    @abstractmethod
    def feature_names(self) -> list[str]:
        """The features that it sends, in the order in which it sends them."""

    @abstractmethod
    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""

    def features_per_rank(self) -> list[int]:
        """How many features each rank receives."""
        return [len(names) for names in self.feature_names_per_rank()]


class ModuleShardingMixIn(ABC):
    """What a sharded module says about its shardings."""

    @property
    @abstractmethod
    def shardings(self) -> Mapping[str, FeatureShardingMixIn]:
        """The shardings by sharding type."""


class BaseSparseFeaturesDist(ABC, nn.Module, Generic[F]):
    """How ids travel: each rank's own samples to the ranks that hold the rows."""

    @abstractmethod
    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[F]]:
        """Begin to send; the first wait ends the exchange of sizes, the second that of ids."""


class BaseEmbeddingDist(ABC, nn.Module, Generic[C, T, W]):
    """How vectors travel back to the ranks whose samples they are of."""

    @abstractmethod
    def forward(self, local_embs: T, sharding_ctx: C | None = None) -> Awaitable[W]:
        """Begin to send; the wait gives the vectors of this rank's samples."""
