"""Sharders that place towers as one: the tables of a tower, and what takes their vectors, on one node.

They are not among the default sharders: without them the collections inside of towers are sharded as any others,
and their interactions are replicated on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tessera.training.distributed.collections.pooled import EmbeddingBagCollectionSharder
from tessera.training.distributed.collections.sharders import BaseEmbeddingSharder
from tessera.training.distributed.collections.tower_places import (
    AMONG_RANKS_OF_NODE,
    tower_tables,
    towers_of,
)
from tessera.training.distributed.collections.towers import (
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
)
from tessera.training.distributed.collections.unpooled import EmbeddingCollectionSharder
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import EmbeddingModuleShardingPlan
from tessera.training.distributed.plan.sharded_module import M
from tessera.training.modules.embedding_modules import EmbeddingBagCollection
from tessera.training.modules.embedding_tower import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    tower_input_params,
)


class _TowerSharder(BaseEmbeddingSharder[M]):
    """What both sharders offer to a planner."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The strategies that keep a table on one node: table-wise, table-row-wise and table-column-wise."""
        del compute_device_type
        return list(AMONG_RANKS_OF_NODE)


class EmbeddingTowerSharder(_TowerSharder[EmbeddingTower]):
    """Turns `EmbeddingTower` into its sharded form, which lives on one node.

    Its arguments are those of `BaseEmbeddingSharder`; the codecs also serve the towers' outputs on their way
    between nodes.
    """

    _plain = EmbeddingTower

    def embedding_sharder(
        self, module: EmbeddingTower
    ) -> EmbeddingBagCollectionSharder | EmbeddingCollectionSharder:
        """The sharder of what a tower looks up in.

        Raises:
            UserError: it is neither an `EmbeddingBagCollection` nor an `EmbeddingCollection`.
        """
        tower_tables(module.embedding)
        if isinstance(module.embedding, EmbeddingBagCollection):
            return EmbeddingBagCollectionSharder(self.fused_params, self.qcomm_codecs_registry)
        return EmbeddingCollectionSharder(self.fused_params, self.qcomm_codecs_registry)

    def embedding_feature_names(self, module: EmbeddingTower) -> tuple[list[str], list[str]]:
        """The features that a tower takes without weights, and those that it takes with weights.

        Raises:
            UserError: as of `embedding_sharder`.
        """
        names = [name for own in tower_tables(module.embedding).values() for name in own]
        is_weighted = tower_input_params(module.embedding)[1]
        return ([], names) if is_weighted else (names, [])

    def shardable_parameters(self, module: EmbeddingTower) -> dict[str, nn.Parameter]:
        """Return the weights of the tower's tables by table name."""
        return _tables(self, module)

    def shard(
        self,
        module: EmbeddingTower,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingTower:
        """The sharded form of ``module``; every rank calls it.

        Raises:
            UserError: the tower cannot be placed as one.
            ValueError: its tables do not lie on one node, or the plan does not fit them.
        """
        return ShardedEmbeddingTower(
            module,
            params,
            self.embedding_sharder(module),
            env,
            device,
            self.qcomm_codecs_registry,
        )


class EmbeddingTowerCollectionSharder(_TowerSharder[EmbeddingTowerCollection]):
    """Turns `EmbeddingTowerCollection` into its sharded form, whose towers live on a node each.

    Its arguments are those of `EmbeddingTowerSharder`.
    """

    _plain = EmbeddingTowerCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._tower_sharder = EmbeddingTowerSharder(fused_params, qcomm_codecs_registry)

    def shardable_parameters(self, module: EmbeddingTowerCollection) -> dict[str, nn.Parameter]:
        """Return the weights of all towers' tables by table name.

        Raises:
            ValueError: two towers have a table of one name.
        """
        return _tables(self._tower_sharder, module)

    def shard(
        self,
        module: EmbeddingTowerCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingTowerCollection:
        """The sharded form of ``module``; every rank calls it.

        Raises:
            UserError: a tower cannot be placed as one.
            ValueError: the tables of a tower do not lie on one node, or the plan does not fit them.
        """
        return ShardedEmbeddingTowerCollection(
            module, params, self._tower_sharder, env, device, self.qcomm_codecs_registry
        )


def _tables(
    sharder: EmbeddingTowerSharder, module: EmbeddingTower | EmbeddingTowerCollection
) -> dict[str, nn.Parameter]:
    return {
        name: weight
        for tower in towers_of(module)
        for name, weight in _shardable(sharder, tower).items()
    }


def _shardable(sharder: EmbeddingTowerSharder, tower: EmbeddingTower) -> dict[str, nn.Parameter]:
    of_collection: Any = sharder.embedding_sharder(tower)
    weights: dict[str, nn.Parameter] = of_collection.shardable_parameters(tower.embedding)
    return weights
