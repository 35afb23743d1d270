"""The sharded forms of a tower and of a collection of towers; `towers_on_nodes` says how they work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tessera.training.distributed.collections.tower_places import (
    place_tower,
    tower_tables,
    towers_of,
)
from tessera.training.distributed.collections.towers_on_nodes import (
    EmbeddingTowerCollectionContext,
    PlannedTower,
    ShardedTowers,
)
from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.travel.kjt_list import KJTList
from tessera.training.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor


class ShardsTowers(Protocol):
    """Says who shards the collection of a tower."""

    def embedding_sharder(self, module: EmbeddingTower) -> ModuleSharder[Any]:
        """The sharder of what a tower looks up in."""


class ShardedEmbeddingTower(ShardedTowers):
    """An `EmbeddingTower` that lives on one node; it is called as the plain one.

    Its state dict and parameters have the plain tower's names on the ranks of the node; the other ranks have
    none.  The output is float32.

    Args:
        module: the plain tower.
        table_name_to_parameter_sharding: where its tables go.
        embedding_sharder: of its collection.
        env, device, qcomm_codecs_registry: as of `ShardedTowers`.

    Raises:
        ValueError: the tables do not lie on one node, or the plan does not fit them.
    """

    embedding: nn.Module
    interaction: nn.Module

    def __init__(  # noqa: PLR0917 - as of the other sharded modules
        self,
        module: EmbeddingTower,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        embedding_sharder: ModuleSharder[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        tables = list(tower_tables(module.embedding))
        place = place_tower("the tower", tables, table_name_to_parameter_sharding, env)
        planned = PlannedTower(module, place, embedding_sharder)
        super().__init__([planned], env, device, qcomm_codecs_registry)

    def _keep(self, number: int, embedding: nn.Module, interaction: nn.Module) -> None:
        del number
        self.embedding, self.interaction = embedding, interaction

    def _path(self, number: int) -> str:
        del number
        return "embedding"

    @property
    def unsharded_module_type(self) -> type[EmbeddingTower]:
        """Return the type of module that this is the sharded form of."""
        return EmbeddingTower

    def input_dist(
        self, ctx: EmbeddingTowerCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the tower's node; see `ShardedTowers._send` for what is refused.

        Args:
            ctx: filled here.
            features: at least the features of the tower's tables, with weights if its collection takes them.
        """
        return self._send(ctx, {self._kinds[0]: features})


class ShardedEmbeddingTowerCollection(ShardedTowers):
    """An `EmbeddingTowerCollection` whose towers live on a node each; it is called as the plain one.

    Its state dict and parameters have the plain collection's names, on each rank those of its node's towers.
    The output is float32.

    Args:
        module: the plain collection.
        table_name_to_parameter_sharding: where the tables of all towers go.
        tower_sharder: its ``embedding_sharder`` gives the sharder of a tower's collection.
        env, device, qcomm_codecs_registry: as of `ShardedTowers`.

    Raises:
        ValueError: the tables of a tower do not lie on one node, or the plan does not fit them.
    """

    def __init__(  # noqa: PLR0917 - as of the other sharded modules
        self,
        module: EmbeddingTowerCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        tower_sharder: ShardsTowers,
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        planned = [
            PlannedTower(
                tower,
                place_tower(
                    f"tower {number}",
                    list(tower_tables(tower.embedding)),
                    table_name_to_parameter_sharding,
                    env,
                ),
                tower_sharder.embedding_sharder(tower),
            )
            for number, tower in enumerate(towers_of(module))
        ]
        super().__init__(planned, env, device, qcomm_codecs_registry)

    def _keep(self, number: int, embedding: nn.Module, interaction: nn.Module) -> None:
        if not number:
            self.towers = nn.ModuleList()
        self.towers.append(EmbeddingTower(embedding, interaction))

    def _path(self, number: int) -> str:
        return f"towers.{number}.embedding"

    @property
    def unsharded_module_type(self) -> type[EmbeddingTowerCollection]:
        """Return the type of module that this is the sharded form of."""
        return EmbeddingTowerCollection

    def input_dist(
        self,
        ctx: EmbeddingTowerCollectionContext,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> Awaitable[Awaitable[KJTList]]:
        """Begin to send ids to the towers' nodes; see `ShardedTowers._send` for what else is refused.

        Args:
            ctx: filled here.
            features: ids, for the towers whose lookups take them without weights.
            weighted_features: ids with weights, for the others.

        Raises:
            ValueError: a tower needs one that is not given.
        """
        given: dict[bool, KeyedJaggedTensor] = {}
        for is_weighted in self._kinds:
            one = weighted_features if is_weighted else features
            if one is None:
                name = "weighted_features" if is_weighted else "features"
                raise ValueError(f"a tower of the collection needs {name}; give them")
            given[is_weighted] = one
        return self._send(ctx, given)
