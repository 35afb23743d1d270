"""What sharded collections share, pooled or not: ids travel, are looked up, and vectors return.

Legend: ``D`` columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from tessera.training.distributed.collections.parts import ShardedTables, refuse_move, replicated
from tessera.training.distributed.collections.sharded_embedding_module import ShardedEmbeddingModule
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.sharded_module import Out
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingContext
from tessera.training.distributed.tables.grouped_lookup import GroupedLookup
from tessera.training.distributed.travel.feature_router import FeatureRouter
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.streamable import Multistreamable


class CollectionContext(Multistreamable):
    """Holds what the steps of one batch share.

    Attributes:
        sharding_contexts: one per sharding.
    """

    sharding_contexts: Sequence[EmbeddingShardingContext]

    @abstractmethod
    def _tensors(self) -> list[Tensor]:
        """What it holds besides the shardings' contexts."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that ``stream`` uses the tensors."""
        for context in self.sharding_contexts:
            context.record_stream(stream)
        for tensor in self._tensors():
            if tensor.is_cuda:
                tensor.record_stream(cast("torch.cuda.Stream", stream))


Ctx = TypeVar("Ctx", bound=CollectionContext)


class ShardedCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Out, Ctx],
    FusedOptimizerModule,
    Generic[Out, Ctx],
):
    """A collection of tables that live where a plan puts them.

    A subclass says what it sends (`input_dist`) and what it makes of the vectors that return
    (`_arriving`).

    Args:
        shardings: by sharding type.
        create_lookup: a sharding's lookup of the rows that are here.
        tables: by name, in the collection's order; each rank takes its shards from them.
        prefix: the attribute that holds the tables: parameters and states are called
            ``<prefix>.<table>.weight``.
        env: who takes part; without a process group all tables are here.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        is_weighted: whether the ids' weights travel with them.
    """

    def __init__(
        self,
        shardings: Mapping[str, TableSharding],
        create_lookup: Callable[[TableSharding], nn.Module],
        tables: Mapping[str, Tensor],
        *,
        prefix: str,
        env: ShardingEnv,
        device: torch.device,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None,
        is_weighted: bool,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._shardings = shardings
        self._device = device
        parts = list(shardings.values())
        lookups = [cast("GroupedLookup", create_lookup(sharding)) for sharding in parts]
        self._tables = ShardedTables(
            list(tables),
            lookups,
            [shard for sharding in parts for shard in sharding.embedding_tables()],
            env.process_group,
        )
        self.add_module(prefix, nn.ModuleDict(self._tables.modules))
        self._tables.fill(tables)
        self._lookups = [
            replicated(lookup, env.process_group, device)
            if sharding.strategy.replicated
            else lookup
            for sharding, lookup in zip(parts, lookups, strict=True)
        ]
        self._fused_optimizer = self._tables.fused_optimizer(prefix)
        self._input_dists = [sharding.create_input_dist(device) for sharding in parts]
        self._output_dists = [sharding.create_output_dist(device) for sharding in parts]
        self._router = FeatureRouter(
            [sharding.feature_names() for sharding in parts], is_weighted=is_weighted
        )
        self._tables.keep_caches_in_step(self)

    @property
    def shardings(self) -> Mapping[str, TableSharding]:
        """Return the shardings by sharding type."""
        return self._shardings

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return self._fused_optimizer

    def reset_parameters(self) -> None:
        """Give every table new first values."""
        self._tables.reset()

    @abstractmethod
    def _arriving(self, ctx: Ctx, awaitables: list[Awaitable[Tensor]]) -> LazyAwaitable[Out]:
        """Return the output that will be made of the vectors when they arrive.

        Args:
            ctx: of the batch.
            awaitables: one per sharding.
        """

    def compute(self, ctx: Ctx, dist_input: KJTList) -> list[Tensor]:
        """Look up the received ids; return per sharding their vectors, as rows or flat."""
        del ctx
        return [
            lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)
        ]

    def output_dist(self, ctx: Ctx, output: list[Tensor]) -> LazyAwaitable[Out]:
        """Begin to send vectors to the ranks that asked for them."""
        return self._arriving(
            ctx,
            [
                dist(vectors, context)
                for dist, vectors, context in zip(
                    self._output_dists, output, ctx.sharding_contexts, strict=True
                )
            ],
        )

    def compute_and_output_dist(
        self,
        ctx: Ctx,
        input: KJTList,  # noqa: A002 - the reference's name
    ) -> LazyAwaitable[Out]:
        """Both; each sharding's vectors travel while the next one's are looked up."""
        return self._arriving(
            ctx,
            [
                dist(lookup(features), context)
                for lookup, dist, features, context in zip(
                    self._lookups, self._output_dists, input, ctx.sharding_contexts, strict=True
                )
            ],
        )

    def _apply(
        self,
        fn: Callable[..., Any],
        recurse: bool = True,  # noqa: FBT001, FBT002 - torch's signature
    ) -> ShardedCollection[Out, Ctx]:
        """Let only pass what leaves the tables where they are."""
        del recurse
        probe = torch.empty(0, device=self._device)
        refuse_move("sharded tables", probe.device, probe.dtype, fn(probe))
        return self

    def __deepcopy__(self, memo: Any) -> ShardedCollection[Out, Ctx]:
        raise ValueError(
            "sharded tables cannot be deep-copied: copies of the parameters would be cut off from "
            "the operator.  Build a second model and load the state_dict"
        )
