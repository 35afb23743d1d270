"""A sharded module around a sharded pooled collection, which does the work."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tessera.training.distributed.collections.pooled import ShardedEmbeddingBagCollection
from tessera.training.distributed.collections.pooled_output import EmbeddingBagCollectionContext
from tessera.training.distributed.collections.sharded_collection import ShardedEmbeddingModule
from tessera.training.distributed.comm.awaitable import LazyAwaitable
from tessera.training.distributed.plan.sharded_module import Out
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.distributed.tables.batched_kernels import Kernel
from tessera.training.distributed.tables.interfaces import BaseGroupedFeatureProcessor
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.optim.fused import FusedOptimizerModule
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedTensor


class AroundPooledCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], Out, EmbeddingBagCollectionContext],
    FusedOptimizerModule,
):
    """Shows a collection's shardings, lookups and distributions as its own.

    A subclass says what the collection is given (`input_dist`), what is made of its output
    (`_arriving`), and under which names the collection's parameters appear: here it is kept
    out of sight of ``named_parameters`` and ``state_dict``.

    Args:
        module: the plain collection; it and the rest are for `ShardedEmbeddingBagCollection`.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        *arguments: Any,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> None:
        collection = ShardedEmbeddingBagCollection(
            module, *arguments, feature_processor=feature_processor
        )
        super().__init__(collection.qcomm_codecs_registry)
        # In a tuple: its names are not this module's.
        self._inner = (collection,)
        self._input_dists = collection._input_dists  # noqa: SLF001 - shown and pipelined as this module's
        self._lookups = collection._lookups  # noqa: SLF001 - shown and pipelined as this module's
        self._output_dists = collection._output_dists  # noqa: SLF001 - shown and pipelined as this module's

    @property
    def shardings(self) -> Mapping[str, TableSharding]:
        """Return the shardings by sharding type."""
        return self._inner[0].shardings

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, under the collection's names for them."""
        return self._inner[0].fused_optimizer

    def table_kernels(self) -> list[Kernel]:
        """What holds the shards of this rank."""
        return self._inner[0].table_kernels()

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return a new context, which holds what the steps of one batch share."""
        return self._inner[0].create_context()

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Look up the received ids; return one tensor of vectors per sharding."""
        return self._inner[0].compute(ctx, dist_input)

    @abstractmethod
    def _arriving(self, pooled: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[Out]:
        """Return the output that will be made of the collection's output when it arrives."""

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[Out]:
        """Begin to send vectors to the ranks of their samples."""
        return self._arriving(self._inner[0].output_dist(ctx, output))

    def compute_and_output_dist(
        self,
        ctx: EmbeddingBagCollectionContext,
        input: KJTList,  # noqa: A002 - the reference's name
    ) -> LazyAwaitable[Out]:
        """Both; each sharding's vectors travel while the next one's are looked up."""
        return self._arriving(self._inner[0].compute_and_output_dist(ctx, input))
