"""On which node a tower lives, and its plan among that node's ranks.

All tables of a tower have their shards on the ranks of one node.  A plan may give them to one rank each
(table-wise), or cut their rows or columns over the node's ranks (table-row-wise, table-column-wise); among
those ranks alone, the latter two are row-wise and column-wise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

AMONG_RANKS_OF_NODE: Mapping[str, str] = {
    ShardingType.TABLE_WISE.value: ShardingType.TABLE_WISE.value,
    ShardingType.TABLE_ROW_WISE.value: ShardingType.ROW_WISE.value,
    ShardingType.TABLE_COLUMN_WISE.value: ShardingType.COLUMN_WISE.value,
}
"""The sharding types of towers' tables, and what each is among the ranks of one node."""


@dataclass(frozen=True)
class TowerPlace:
    """Where a tower lives.

    Attributes:
        node: the node, 0 to the number of nodes - 1.
        plan: its tables' placements, which count the ranks from the node's first one on.
    """

    node: int
    plan: EmbeddingModuleShardingPlan


def tower_tables(embedding: nn.Module) -> dict[str, list[str]]:
    """The features of each table that a tower looks up in.

    Raises:
        UserError: the tower looks up in something else than an `EmbeddingBagCollection` or an
            `EmbeddingCollection`.
    """
    if isinstance(embedding, EmbeddingBagCollection):
        return {
            table.name: list(table.feature_names) for table in embedding.embedding_bag_configs()
        }
    if isinstance(embedding, EmbeddingCollection):
        return {table.name: list(table.feature_names) for table in embedding.embedding_configs()}
    raise UserError(
        f"a tower looks up in a {type(embedding).__name__}; towers of an EmbeddingBagCollection or an "
        "EmbeddingCollection are placed as one, so leave the sharders of towers out for this model"
    )


def towers_of(module: EmbeddingTower | EmbeddingTowerCollection) -> list[EmbeddingTower]:
    """The towers of a collection, or the tower itself.

    Raises:
        ValueError: two towers have a table of one name.
    """
    if isinstance(module, EmbeddingTower):
        return [module]
    towers: list[EmbeddingTower] = list(module.towers)  # type: ignore[arg-type] # its constructor takes such
    homes: dict[str, int] = {}
    for number, tower in enumerate(towers):
        for table in tower_tables(tower.embedding):
            if homes.setdefault(table, number) != number:
                raise ValueError(
                    f"towers {homes[table]} and {number} have a table {table!r} each; a plan places tables by "
                    "name, so give them different names"
                )
    return towers


def place_tower(
    name: str, tables: Sequence[str], plan: Mapping[str, ParameterSharding], env: ShardingEnv
) -> TowerPlace:
    """The node of a tower, and its plan there.

    Args:
        name: of the tower, for messages.
        tables: its tables' names.
        plan: placements by table; those of other towers are not looked at.
        env: who takes part.

    Raises:
        ValueError: a table has no placement or one of another sharding type, or the tables lie on
            several nodes.
    """
    per_node = env.ranks_per_node
    home: tuple[str, int] | None = None  # the first table and its node
    for table in tables:
        if table not in plan:
            raise ValueError(
                f"table {table!r} of {name} is not in the plan, which places {sorted(plan)}; place all "
                "tables of a tower"
            )
        kind = plan[table].sharding_type
        if kind not in AMONG_RANKS_OF_NODE:
            raise ValueError(
                f"table {table!r} of {name} is {kind}; the tables of a tower live on one node, so give "
                f"one of {', '.join(AMONG_RANKS_OF_NODE)}"
            )
        for rank in _ranks(name, table, plan[table], env.world_size):
            home = home or (table, rank // per_node)
            if rank // per_node != home[1]:
                raise ValueError(
                    f"table {table!r} of {name} has a shard on rank {rank}, of node {rank // per_node}, and "
                    f"table {home[0]!r} of the same tower is on node {home[1]}; place all tables of a tower on "
                    f"the ranks of one node, such as {_ranks_of(home[1], per_node)}"
                )
    node = 0 if home is None else home[1]
    first_rank = node * per_node
    return TowerPlace(
        node,
        EmbeddingModuleShardingPlan(
            {table: _among_ranks_of_node(plan[table], first_rank) for table in tables}
        ),
    )


def _ranks_of(node: int, per_node: int) -> str:
    first, last = node * per_node, (node + 1) * per_node - 1
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _ranks(name: str, table: str, placement: ParameterSharding, world_size: int) -> list[int]:
    """The ranks of a table's shards.

    Raises:
        ValueError: the placement does not say them, or they are not in the world.
    """
    spec = placement.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        places = [shard.placement.rank() for shard in spec.shards if shard.placement is not None]
        ranks = [rank for rank in places if rank is not None]
    else:
        ranks = list(placement.ranks or ([0] if world_size == 1 else []))
    wrong = [rank for rank in ranks if not 0 <= rank < world_size]
    if wrong or not ranks:
        raise ValueError(
            f"table {table!r} of {name}: the plan puts its shards on ranks {ranks}; give ranks 0 to "
            f"{world_size - 1}, by a function of tessera.training.distributed.sharding_plan"
        )
    return ranks


def _among_ranks_of_node(placement: ParameterSharding, first_rank: int) -> ParameterSharding:
    spec = placement.sharding_spec
    if isinstance(spec, EnumerableShardingSpec):
        spec = EnumerableShardingSpec([_counted_from(first_rank, shard) for shard in spec.shards])
    return replace(
        placement,
        sharding_type=AMONG_RANKS_OF_NODE[placement.sharding_type],
        ranks=None if placement.ranks is None else [r - first_rank for r in placement.ranks],
        sharding_spec=spec,
    )


def _counted_from(first_rank: int, shard: ShardMetadata) -> ShardMetadata:
    assert shard.placement is not None, "a shard's place was looked at before"
    rank = shard.placement.rank()
    assert rank is not None, "a shard's place was looked at before"
    where = f"rank:{rank - first_rank}/{shard.placement.device()}"
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), where)
