"""EmbeddingCollection whose tables are spread over ranks, and the sharder that makes it.

As in `tessera.training.distributed.embeddingbag`, but every id has a vector of its own: vectors
travel back along the way of the ids, and nothing is pooled.

Legend: ``N`` ids, ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from tessera.training.distributed.collection_parts import ShardedTables, refuse_move, replicated
from tessera.training.distributed.embedding_lookup import GroupedEmbeddingsLookup
from tessera.training.distributed.embedding_sharding import KJTListSplitsAwaitable
from tessera.training.distributed.embedding_types import (
    BaseEmbeddingSharder,
    KJTList,
    ShardedEmbeddingModule,
)
from tessera.training.distributed.feature_router import FeatureRouter
from tessera.training.distributed.index_dedup import (
    IndexDeduplicator,
    get_ec_index_dedup,
    set_ec_index_dedup,
)
from tessera.training.distributed.sequence_output import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionContext,
    SequenceOutput,
)
from tessera.training.distributed.sequence_tables import (
    create_embedding_sharding,
    create_sharding_infos_by_sharding,
    tables_of,
)
from tessera.training.distributed.sharding.sequence_sharding import (
    SequenceSharding,
    SequenceShardingContext,
)
from tessera.training.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from tessera.training.modules.embedding_configs import EmbeddingConfig
from tessera.training.modules.embedding_modules import EmbeddingCollection
from tessera.training.optim.fused import FusedOptimizerModule, FusedParams
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "EmbeddingCollectionAwaitable",
    "EmbeddingCollectionContext",
    "EmbeddingCollectionSharder",
    "ShardedEmbeddingCollection",
    "create_embedding_sharding",
    "create_sharding_infos_by_sharding",
    "get_ec_index_dedup",
    "set_ec_index_dedup",
]


class ShardedEmbeddingCollection(
    ShardedEmbeddingModule[
        KJTList, list[Tensor], dict[str, JaggedTensor], EmbeddingCollectionContext
    ],
    FusedOptimizerModule,
):
    """An `EmbeddingCollection` whose tables live where a plan puts them.

    Input and output are those of the plain collection, for this rank's own samples.  Parameters
    and state dicts have the plain collection's names (``embeddings.<table>.weight``); with a
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
        use_index_dedup: send each id once and repeat its vector here.  It pays where ids come
            often: the price is a sort of the batch's ids.

    Raises:
        ValueError: a plan that does not fit the tables or the ranks.

    Memory: this rank's shards, their optimizer's state, and until ``module`` is dropped its
    tables too.
    """

    def __init__(  # noqa: PLR0917 - the reference's signature
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self._configs = module.embedding_configs()
        self._names_by_table = module.embedding_names_by_table()
        self._embedding_dim = module.embedding_dim()
        self._need_indices = module.need_indices()
        self._env = env
        self._device = device or torch.device("cpu")
        infos = create_sharding_infos_by_sharding(
            module, table_name_to_parameter_sharding, env, self._device, fused_params
        )
        self._shardings: dict[str, SequenceSharding] = {
            kind: create_embedding_sharding(kind, own, env, self._device, qcomm_codecs_registry)
            for kind, own in infos.items()
        }
        shardings = list(self._shardings.values())
        lookups = [
            cast("GroupedEmbeddingsLookup", sharding.create_lookup(self._device))
            for sharding in shardings
        ]
        self._tables = ShardedTables(
            [table.name for table in self._configs],
            lookups,
            [shard for sharding in shardings for shard in sharding.embedding_tables()],
            env.process_group,
        )
        self.embeddings = nn.ModuleDict(self._tables.modules)
        self._tables.fill(tables_of(module))
        self._lookups = [
            replicated(lookup, env.process_group, self._device)
            if kind == ShardingType.DATA_PARALLEL.value
            else lookup
            for kind, lookup in zip(self._shardings, lookups, strict=True)
        ]
        self._fused_optimizer = self._tables.fused_optimizer("embeddings")
        self._input_dists = [sharding.create_input_dist(self._device) for sharding in shardings]
        self._output_dists = [sharding.create_output_dist(self._device) for sharding in shardings]
        self._router = FeatureRouter(
            [sharding.feature_names() for sharding in shardings], is_weighted=False
        )
        self._output = SequenceOutput(
            [name for names in self._names_by_table for name in names],
            [sharding.output_columns() for sharding in shardings],
            need_indices=self._need_indices,
        )
        dedup = use_index_dedup or get_ec_index_dedup()
        self._deduplicators = [
            self._deduplicator(sharding)
            if dedup and not sharding.is_local() and kind != ShardingType.DATA_PARALLEL.value
            else None
            for kind, sharding in self._shardings.items()
        ]
        self.register_state_dict_pre_hook(lambda *_: self._tables.flush())  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.register_load_state_dict_post_hook(lambda *_: self._tables.purge())  # type: ignore[no-untyped-call] # torch leaves it untyped

    def _deduplicator(self, sharding: SequenceSharding) -> IndexDeduplicator:
        rows = [
            size
            for groups in sharding.groups_per_sender()
            for group in groups
            for size in group.feature_hash_sizes()
        ]
        return IndexDeduplicator(rows, self._device)

    @property
    def shardings(self) -> Mapping[str, SequenceSharding]:
        """The shardings by sharding type."""
        return self._shardings

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The type that this is the sharded form of."""
        return EmbeddingCollection

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        return self._fused_optimizer

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The output's names of each table's features."""
        return self._names_by_table

    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether the output carries the ids, as weights."""
        return self._need_indices

    def reset_parameters(self) -> None:
        """Give every table new first values."""
        self._tables.reset()

    def create_context(self) -> EmbeddingCollectionContext:
        """What the steps of one batch share."""
        return EmbeddingCollectionContext()

    def input_dist(
        self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows.

        Args:
            ctx: filled here.
            features: at least the features of all tables; others are ignored.

        Raises:
            IndexError: an id is not a row of its table (where ids are sent once).
            KeyError: a feature is missing.
            ValueError: the values are not int32 or int64.
        """
        awaitables = []
        with torch.no_grad():
            ctx.input_features = self._router.route(features)
            ctx.sharding_contexts, ctx.reverse_indices = [], []
            for part, dist, deduplicator in zip(
                ctx.input_features, self._input_dists, self._deduplicators, strict=True
            ):
                sent, places = (
                    (part, None) if deduplicator is None else (deduplicator.deduplicate(part))
                )
                varies = sent.variable_stride_per_key()
                awaitables.append(dist(sent))
                ctx.reverse_indices.append(places)
                ctx.sharding_contexts.append(
                    SequenceShardingContext(
                        batch_size_per_feature_pre_a2a=sent.stride_per_key() if varies else [],
                        variable_batch_per_feature=varies,
                        features_before_input_dist=sent,
                        unbucketize_permute_tensor=getattr(
                            dist, "unbucketize_permute_tensor", None
                        ),
                    )
                )
        return KJTListSplitsAwaitable(awaitables, ctx)

    def compute(self, ctx: EmbeddingCollectionContext, dist_input: KJTList) -> list[Tensor]:
        """Look up what arrived: per sharding ``[N * D]``."""
        del ctx
        return [
            lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)
        ]

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Begin to send vectors to the ranks of their ids."""
        awaitables = [
            dist(vectors, context)
            for dist, vectors, context in zip(
                self._output_dists, output, ctx.sharding_contexts, strict=True
            )
        ]
        return EmbeddingCollectionAwaitable(awaitables, ctx, self._output)

    def compute_and_output_dist(
        self,
        ctx: EmbeddingCollectionContext,
        input: KJTList,  # noqa: A002 - the reference's name
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Both; each sharding's vectors travel while the next one's are looked up."""
        awaitables = [
            dist(lookup(features), context)
            for lookup, dist, features, context in zip(
                self._lookups, self._output_dists, input, ctx.sharding_contexts, strict=True
            )
        ]
        return EmbeddingCollectionAwaitable(awaitables, ctx, self._output)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ShardedEmbeddingCollection:  # noqa: FBT001, FBT002 - torch's signature
        """Let only pass what leaves the tables where they are."""
        del recurse
        probe = torch.empty(0, device=self._device)
        refuse_move("sharded tables", probe.device, probe.dtype, fn(probe))
        return self

    def __deepcopy__(self, memo: Any) -> ShardedEmbeddingCollection:
        raise ValueError(
            "sharded tables cannot be deep-copied: copies of the parameters would be cut off from "
            "the operator.  Build a second model and load the state_dict"
        )


class EmbeddingCollectionSharder(BaseEmbeddingSharder[EmbeddingCollection]):
    """Turns `EmbeddingCollection` into its sharded form.

    Args:
        fused_params: keys of `FusedParams`.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
        use_index_dedup: see `ShardedEmbeddingCollection`.

    Raises:
        ValueError: an unknown key or value.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,  # noqa: FBT001, FBT002 - the reference's signature
    ) -> None:
        FusedParams.from_dict(fused_params or {})
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    @property
    def module_type(self) -> type[EmbeddingCollection]:
        """The type that this sharder takes."""
        return EmbeddingCollection

    def shardable_parameters(self, module: EmbeddingCollection) -> dict[str, nn.Parameter]:
        """The tables' weights by table name."""
        return tables_of(module)

    def shard(
        self,
        module: EmbeddingCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingCollection:
        """The sharded form of ``module``, with its weights.

        Raises:
            ValueError: a plan that does not fit the tables or the ranks.
        """
        return ShardedEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            self.qcomm_codecs_registry,
            self._use_index_dedup,
        )
