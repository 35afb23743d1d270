"""Collections with feature processors, spread over ranks.

Ids travel without weights; the processors' weights are looked up where the rows are.  Each rank
holds all processors' parameters.  A rank's gradient of them is the part of its rows, so their
average over the ranks is scaled up to a sum
(`tessera.training.distributed.embedding_lookup.GroupedPooledEmbeddingsLookup`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from tessera.training.distributed.collections.around_pooled import AroundPooledCollection
from tessera.training.distributed.collections.pooled import (
    EmbeddingBagCollectionSharder,
)
from tessera.training.distributed.collections.pooled_output import EmbeddingBagCollectionContext
from tessera.training.distributed.collections.position_weights import GroupedPositionWeightedModule
from tessera.training.distributed.collections.sharders import CollectionSharder
from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.creation import tables_of
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.tables.interfaces import BaseGroupedFeatureProcessor
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.feature_processor_ import (
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from tessera.training.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    process_each,
)
from tessera.training.optim.keyed import CombinedOptimizer
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

Processors = FeatureProcessorsCollection | nn.ModuleDict


class _WholeBags(BaseGroupedFeatureProcessor):
    """Any processor, for lookups that see whole bags."""

    def __init__(self, processors: Processors) -> None:
        super().__init__()
        self._processors = processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if isinstance(self._processors, nn.ModuleDict):
            return process_each(features, self._processors)
        return cast("KeyedJaggedTensor", self._processors(features))


def _position_weights(processors: Processors) -> nn.ParameterDict | None:
    """The weights, if that is all that ``processors`` do."""
    if type(processors) is PositionWeightedModuleCollection:
        return processors.position_weights
    if type(processors) is FeatureProcessorDictWrapper:
        return _position_weights(processors._feature_processors)  # noqa: SLF001 - a class of ours, beside the plain module
    if isinstance(processors, nn.ModuleDict):
        weights = {
            name: own.position_weight
            for name, own in processors.items()
            if type(own) is PositionWeightedModule
        }
        if len(weights) == len(processors):
            return nn.ParameterDict(weights)
    return None


def _grouped(
    processors: Processors, plan: Mapping[str, ParameterSharding]
) -> BaseGroupedFeatureProcessor:
    weights = _position_weights(processors)
    if weights is not None:
        lengths = {name: own.numel() for name, own in weights.items()}
        return GroupedPositionWeightedModule(lengths, position_weights=weights)
    split = [table for table, where in plan.items() if strategy_of(where.sharding_type).splits_bags]
    if split:
        raise ValueError(
            f"table {split[0]!r} is {plan[split[0]].sharding_type}, which splits bags; only "
            "position weights can follow, so place tables with other processors table-wise, "
            "column-wise or data-parallel"
        )
    return _WholeBags(processors)


class ShardedFeatureProcessedEmbeddingBagCollection(AroundPooledCollection[KeyedTensor]):
    """A `FeatureProcessedEmbeddingBagCollection` whose tables live where a plan puts them.

    Its arguments are those of `ShardedCollection`.

    Raises:
        ValueError: a plan that does not fit the tables, the ranks or the processors.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        processors = module._feature_processors.to(device or torch.device("cpu"))  # noqa: SLF001 - the plain form of this class
        super().__init__(
            module._embedding_bag_collection,  # noqa: SLF001 - the plain form of this class
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
            feature_processor=_grouped(processors, table_name_to_parameter_sharding),
        )
        self._feature_processors = processors
        self._embedding_bag_collection = self._inner[0]

    @property
    def unsharded_module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """Return the type of module that this is the sharded form of."""
        return FeatureProcessedEmbeddingBagCollection

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer of the fused tables here, which works in the backward pass."""
        parts = self._embedding_bag_collection.fused_optimizer
        return CombinedOptimizer([("_embedding_bag_collection", parts)])

    def update_shards(
        self,
        changed_sharding_params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Move tables; see `ShardedCollection.update_shards`.

        Raises:
            ValueError: a placement does not go with the processors.
        """
        _grouped(self._feature_processors, changed_sharding_params)
        self._embedding_bag_collection.update_shards(changed_sharding_params, env, device)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The tables'; the processors' parameters are alike on all ranks."""
        inner = "_embedding_bag_collection"
        yield from self._embedding_bag_collection.sharded_parameter_names(
            f"{prefix}.{inner}" if prefix else inner
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the ranks that hold their rows; weights are left behind."""
        return self._embedding_bag_collection.input_dist(ctx, features)

    def _arriving(self, pooled: LazyAwaitable[KeyedTensor]) -> LazyAwaitable[KeyedTensor]:
        return pooled


class FeatureProcessedEmbeddingBagCollectionSharder(
    CollectionSharder[
        FeatureProcessedEmbeddingBagCollection, ShardedFeatureProcessedEmbeddingBagCollection
    ]
):
    """Turns `FeatureProcessedEmbeddingBagCollection` into its sharded form.

    Args:
        ebc_sharder: whose settings and codecs the collection's tables have; None: those given here,
            as to a `CollectionSharder`.

    Raises:
        ValueError: an unknown key or value, or settings both here and in ``ebc_sharder``.
    """

    _plain = FeatureProcessedEmbeddingBagCollection
    _sharded = ShardedFeatureProcessedEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        if ebc_sharder is not None:
            if not isinstance(ebc_sharder, EmbeddingBagCollectionSharder):
                raise ValueError(
                    f"ebc_sharder is a {type(ebc_sharder).__name__}; give an "
                    "EmbeddingBagCollectionSharder, or settings as fused_params="
                )
            if fused_params is not None:
                raise ValueError("fused_params beside an ebc_sharder; give them to that")
            fused_params = ebc_sharder.fused_params
            qcomm_codecs_registry = ebc_sharder.qcomm_codecs_registry
        super().__init__(fused_params, qcomm_codecs_registry)

    def shardable_parameters(
        self, module: FeatureProcessedEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """Return the weights of the tables by table name."""
        return tables_of(module._embedding_bag_collection.embedding_bags)  # noqa: SLF001 - the plain form of what this makes
