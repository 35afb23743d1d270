"""EmbeddingBagCollection whose tables are spread over ranks, and the sharder that makes it.

A batch goes three ways, one per sharding type that the plan uses: ids travel (`input_dist`), are
looked up where their rows are (`compute`), and vectors travel back (`output_dist`).  See
`tessera.training.distributed.sharding`.

Legend: ``B`` samples of this rank, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tessera.training.distributed.collection_parts import ShardedTables, refuse_move, replicated
from tessera.training.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from tessera.training.distributed.embedding_sharding import (
    ROW_SPLIT_TYPES,
    EmbeddingShardingContext,
    KJTListSplitsAwaitable,
)
from tessera.training.distributed.embedding_types import (
    BaseEmbeddingSharder,
    BaseGroupedFeatureProcessor,
    KJTList,
    ShardedEmbeddingModule,
)
from tessera.training.distributed.embeddingbag_output import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionContext,
)
from tessera.training.distributed.embeddingbag_shardings import (
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
    tables_of,
)
from tessera.training.distributed.feature_router import FeatureRouter
from tessera.training.distributed.pooled_output import MeanDivisor, PooledOutput
from tessera.training.distributed.sharding.planned import PooledSharding
from tessera.training.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from tessera.training.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.optim.fused import FusedOptimizerModule, FusedParams
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(
    ShardedEmbeddingModule[KJTList, list[Tensor], KeyedTensor, EmbeddingBagCollectionContext],
    FusedOptimizerModule,
):
    """An `EmbeddingBagCollection` whose tables live where a plan puts them.

    Input and output are those of the plain collection, for this rank's own samples.  Parameters
    and state dicts have the plain collection's names (``embedding_bags.<table>.weight``); with a
    process group the state's tables are ``ShardedTensor``s.  Fused tables are updated by the
    backward pass, so no gradient of them ever exists.

    Args:
        module: the plain collection.  Each rank takes its shards from it; from the ``meta``
            device they get first values here, so that a table need never exist whole.
        table_name_to_parameter_sharding: the plan.
        env: who takes part; without a process group all tables are here.
        fused_params: the tables' optimizer (`FusedParams`).
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        feature_processor: puts weights on ids where they are looked up.

    Raises:
        ValueError: a plan that does not fit the tables or the ranks.

    Memory: this rank's shards, their optimizer's state, and until ``module`` is dropped its
    tables too.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        feature_processor: BaseGroupedFeatureProcessor | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._embedding_names = module.embedding_names()
        self._env = env
        self._device = device or torch.device("cpu")
        infos = create_sharding_infos_by_sharding(
            module,
            table_name_to_parameter_sharding,
            fused_params=fused_params,
            world_size=env.world_size,
            device=self._device,
            has_feature_processor=feature_processor is not None,
        )
        self._shardings: dict[str, PooledSharding] = {
            kind: create_embedding_bag_sharding(
                kind,
                own,
                env,
                self._device,
                permute_embeddings=True,
                qcomm_codecs_registry=qcomm_codecs_registry,
            )
            for kind, own in infos.items()
        }
        lookups = [
            cast(
                "GroupedPooledEmbeddingsLookup",
                sharding.create_lookup(self._device, feature_processor=feature_processor),
            )
            for sharding in self._shardings.values()
        ]
        self._tables = ShardedTables(
            [table.name for table in self._configs],
            lookups,
            [
                shard
                for sharding in self._shardings.values()
                for shard in sharding.embedding_tables()
            ],
            env.process_group,
        )
        self.embedding_bags = nn.ModuleDict(self._tables.modules)
        self._tables.fill(tables_of(module))
        self._lookups = [
            replicated(lookup, env.process_group, self._device)
            if kind == ShardingType.DATA_PARALLEL.value
            else lookup
            for kind, lookup in zip(self._shardings, lookups, strict=True)
        ]
        self._fused_optimizer = self._tables.fused_optimizer("embedding_bags")
        self._input_dists = [s.create_input_dist(self._device) for s in self._shardings.values()]
        self._output_dists = [s.create_output_dist(self._device) for s in self._shardings.values()]
        self._router = FeatureRouter(
            [sharding.feature_names() for sharding in self._shardings.values()],
            # A processor makes the weights where the rows are.
            is_weighted=self._is_weighted and feature_processor is None,
        )
        self._output = self._output_order()
        self._divisors = [
            self._mean_divisor(kind, sharding) for kind, sharding in self._shardings.items()
        ]
        self._tables.keep_caches_in_step(self)

    def _output_order(self) -> PooledOutput:
        return PooledOutput(
            self._embedding_names,
            [table.embedding_dim for table in self._configs for _ in table.feature_names],
            [sharding.output_parts() for sharding in self._shardings.values()],
            [sharding.flat_parts() for sharding in self._shardings.values()],
        )

    def _mean_divisor(self, kind: str, sharding: PooledSharding) -> MeanDivisor | None:
        means = (
            {table.name for table in self._configs if table.pooling is PoolingType.MEAN}
            if kind in ROW_SPLIT_TYPES
            else set()
        )
        is_mean = [
            table.name in means
            for groups in sharding.groups_per_sender()
            for group in groups
            for table in group.embedding_tables
            for _ in table.feature_names
        ]
        if not any(is_mean):
            return None
        widths = [part.columns.width for part in sharding.flat_parts()]
        return MeanDivisor(is_mean, widths, sharding.order)

    @property
    def shardings(self) -> Mapping[str, PooledSharding]:
        """The shardings by sharding type."""
        return self._shardings

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The type that this is the sharded form of."""
        return EmbeddingBagCollection

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return self._fused_optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._configs

    def embedding_names(self) -> list[str]:
        """The output's keys."""
        return self._embedding_names

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def reset_parameters(self) -> None:
        """Give every table new first values."""
        self._tables.reset()

    def create_context(self) -> EmbeddingBagCollectionContext:
        """What the steps of one batch share."""
        return EmbeddingBagCollectionContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows.

        Args:
            ctx: filled here.
            features: at least the features of all tables; others are ignored.

        Raises:
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64, weights are missing, or the batch
                varies per feature without inverse indices.
        """
        varies = features.variable_stride_per_key()
        if varies:
            ctx.inverse_indices = features.inverse_indices_or_none()
            if ctx.inverse_indices is None:
                raise ValueError(
                    "the batch size varies per feature, but there are no inverse_indices to tell "
                    "which bag each sample uses; give them to the KeyedJaggedTensor"
                )
        ctx.variable_batch_per_feature = varies
        with torch.no_grad():
            parts = self._router.route(features)
            ctx.mean_factors = [
                None if divisor is None else divisor.factors(part)
                for divisor, part in zip(self._divisors, parts, strict=True)
            ]
        ctx.sharding_contexts = [
            EmbeddingShardingContext(
                batch_size_per_feature_pre_a2a=part.stride_per_key() if varies else [],
                variable_batch_per_feature=varies,
            )
            for part in parts
        ]
        awaitables = [dist(part) for dist, part in zip(self._input_dists, parts, strict=True)]
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Look up what arrived: per sharding ``[sum of B, columns here]``."""
        del ctx
        return [
            lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)
        ]

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[KeyedTensor]:
        """Begin to send vectors to the ranks of their samples."""
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
        ctx: EmbeddingBagCollectionContext,
        input: KJTList,  # noqa: A002 - the reference's name
    ) -> LazyAwaitable[KeyedTensor]:
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

    def _arriving(
        self, ctx: EmbeddingBagCollectionContext, awaitables: list[Awaitable[Tensor]]
    ) -> LazyAwaitable[KeyedTensor]:
        def join(outputs: list[Tensor]) -> KeyedTensor:
            divided = [
                vectors if factors is None else vectors * factors
                for vectors, factors in zip(outputs, ctx.mean_factors, strict=True)
            ]
            if ctx.inverse_indices is None:
                return self._output.join(divided)
            strides = [c.batch_size_per_feature_pre_a2a for c in ctx.sharding_contexts]
            return self._output.join_variable(divided, strides, ctx.inverse_indices)

        return EmbeddingBagCollectionAwaitable(awaitables, join)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedEmbeddingBagCollection:  # noqa: FBT001, FBT002 - torch's signature
        """Let only pass what leaves the tables where they are."""
        del recurse
        probe = torch.empty(0, device=self._device)
        refuse_move("sharded tables", probe.device, probe.dtype, fn(probe))
        return self

    def __deepcopy__(self, memo: Any) -> ShardedEmbeddingBagCollection:
        raise ValueError(
            "sharded tables cannot be deep-copied: copies of the parameters would be cut off from "
            "the operator.  Build a second model and load the state_dict"
        )


class EmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """Turns `EmbeddingBagCollection` into its sharded form.

    Args:
        fused_params: keys of `FusedParams`.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: an unknown key or value.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        FusedParams.from_dict(fused_params or {})
        super().__init__(fused_params, qcomm_codecs_registry)

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """The type that this sharder takes."""
        return EmbeddingBagCollection

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """The tables' weights by table name."""
        return tables_of(module)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """The sharded form of ``module``, with its weights.

        Raises:
            ValueError: a plan that does not fit the tables or the ranks.
        """
        return ShardedEmbeddingBagCollection(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry
        )
