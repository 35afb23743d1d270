"""EmbeddingBagCollection whose tables are spread over ranks, and the sharder that makes it.

A batch goes the same way in every sharding, of which there is one per sharding type that the plan uses
(table-wise and column-wise tables have one in common): ids travel (`input_dist`), are
looked up where their rows are (`compute`), and vectors travel back (`output_dist`).  See
`tessera.training.distributed.sharding`.

Legend: ``B`` samples of this rank, ``D`` columns.
"""

from __future__ import annotations

from torch import Tensor, nn

from tessera.training.distributed.collections.pooled_output import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
    MeanDivisor,
    PooledOutput,
)
from tessera.training.distributed.collections.sharded_collection import ShardedCollection
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.sharding.embedding_sharding import TableSharding
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.tables import DescribesPooled
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(
    DescribesPooled, ShardedCollection[KeyedTensor, EmbeddingBagCollectionContext]
):
    """An `EmbeddingBagCollection` whose tables live where a plan puts them.

    Its arguments, its names and its memory are those of `ShardedCollection`.
    """

    embedding_bags: nn.ModuleDict
    _holder = "embedding_bags"
    _context = EmbeddingBagCollectionContext
    _awaitable = EmbeddingBagCollectionAwaitable

    def _prepare_output(self, module: EmbeddingBagCollection) -> None:
        self.configs = module.embedding_bag_configs()
        self.weighted = module.is_weighted()
        shardings = list(self._shardings.values())
        self._output = PooledOutput(
            module.embedding_names(),
            [table.embedding_dim for table in self.configs for _ in table.feature_names],
            [sharding.output_parts() for sharding in shardings],
            [sharding.layout.parts() for sharding in shardings],
        )
        self._divisors = [self._mean_divisor(sharding) for sharding in shardings]

    def _mean_divisor(self, sharding: TableSharding) -> MeanDivisor | None:
        if not sharding.strategy.splits_bags:
            return None
        means = {table.name for table in self.configs if table.pooling is PoolingType.MEAN}
        is_mean = [
            table.name in means
            for groups in sharding.layout.groups_per_team()
            for group in groups
            for table in group.embedding_tables
            for _ in table.feature_names
        ]
        if not any(is_mean):
            return None
        widths = [part.columns.width for part in sharding.layout.parts()]
        return MeanDivisor(is_mean, widths, sharding.order)

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The type of module that this is the sharded form of."""
        return EmbeddingBagCollection

    def _prepared(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> list[KeyedJaggedTensor]:
        ctx.variable_batch_per_feature = features.variable_stride_per_key()
        if ctx.variable_batch_per_feature:
            ctx.inverse_indices = features.inverse_indices_or_none()
            if ctx.inverse_indices is None:
                raise ValueError(
                    "the batch size varies per feature, but there are no inverse_indices to tell "
                    "which bag each sample uses; give them to the KeyedJaggedTensor"
                )
        parts = self._router.route(features)
        ctx.mean_factors = [
            None if divisor is None else divisor.factors(part)
            for divisor, part in zip(self._divisors, parts, strict=True)
        ]
        return parts

    def _joined(self, ctx: EmbeddingBagCollectionContext, outputs: list[Tensor]) -> KeyedTensor:
        divided = [
            vectors if factors is None else vectors * factors
            for vectors, factors in zip(outputs, ctx.mean_factors, strict=True)
        ]
        if ctx.inverse_indices is None:
            return self._output.join(divided)
        strides = [c.batch_size_per_feature_pre_a2a for c in ctx.sharding_contexts]
        return self._output.join_variable(divided, strides, ctx.inverse_indices)


class EmbeddingBagCollectionSharder(
    CollectionSharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]
):
    """Turns `EmbeddingBagCollection` into its sharded form; see `CollectionSharder`."""

    _plain, _sharded = EmbeddingBagCollection, ShardedEmbeddingBagCollection
