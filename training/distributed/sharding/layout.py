"""Who holds what under a plan, for the tables of one collection that share a strategy.

Legend: ``W`` ranks, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.nodes import get_local_size
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingShardingInfo,
    OutputColumns,
    group_tables,
    output_columns,
)
from tessera.training.distributed.tables.table_shards import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
)
from tessera.training.modules.embedding_configs import PoolingType

Team = Sequence[int]
"""Ranks that look up the same features, each in its own rows: in the order of their rows."""


@dataclass(frozen=True)
class World:
    """Where this rank stands.

    Attributes:
        rank: this rank.
        size: number of ranks.
        local_size: ranks per node.
    """

    rank: int
    size: int
    local_size: int


def each_rank(world: World) -> list[Team]:
    """Every rank looks up features of its own."""
    return [[rank] for rank in range(world.size)]


def all_ranks(world: World) -> list[Team]:
    """All ranks look up the same features."""
    return [range(world.size)]


def nodes(world: World) -> list[Team]:
    """The ranks of a node look up the same features."""
    return [
        range(first, first + world.local_size) for first in range(0, world.size, world.local_size)
    ]


def own_rank(world: World) -> list[Team]:
    """Each rank looks up its own samples, of all features."""
    return [[world.rank]]


def _shard(
    info: EmbeddingShardingInfo,
    local: ShardMetadata | None,
    whole: ShardedTensorMetadata | None,
    *,
    splits_bags: bool,
) -> ShardedEmbeddingTable:
    config = info.embedding_config
    rows, columns = (
        (config.num_embeddings, config.embedding_dim) if local is None else local.shard_sizes
    )
    return ShardedEmbeddingTable(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        weight_init_max=config.get_weight_init_max(),
        weight_init_min=config.get_weight_init_min(),
        init_fn=config.init_fn,
        # A rank that sees a part of a bag cannot divide by the bag's size: the mean is made
        # from the sum after the ranks' parts were added.
        pooling=(
            PoolingType.SUM
            if splits_bags and config.pooling is PoolingType.MEAN
            else config.pooling
        ),
        is_weighted=config.is_weighted,
        has_feature_processor=config.has_feature_processor,
        embedding_names=list(config.embedding_names),
        compute_kernel=EmbeddingComputeKernel(info.param_sharding.compute_kernel),
        local_rows=rows,
        local_cols=columns,
        local_metadata=local,
        global_metadata=whole,
        fused_params=info.fused_params,
    )


def _shards_of(info: EmbeddingShardingInfo) -> tuple[list[ShardMetadata], ShardedTensorMetadata]:
    spec = info.param_sharding.sharding_spec
    config = info.embedding_config
    if not isinstance(spec, EnumerableShardingSpec):
        raise ValueError(  # noqa: TRY004 - the plan's value is wrong, not an argument's type
            f"table {config.name!r}: the plan has no list of shards (sharding_spec is {spec!r}); "
            "make it with tessera.training.distributed.sharding_plan or the planner"
        )
    shards = list(spec.shards)
    covered = sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards)
    if covered != config.num_embeddings * config.embedding_dim:
        raise ValueError(
            f"table {config.name!r}: the plan's shards hold {covered} numbers, the table has "
            f"{config.num_embeddings} x {config.embedding_dim}; make the plan for this table"
        )
    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size([config.num_embeddings, config.embedding_dim]),
        tensor_properties=TensorProperties(
            dtype=info.param.dtype,
            layout=torch.strided,
            requires_grad=False,
            memory_format=torch.contiguous_format,
            pin_memory=False,
        ),
    )
    return shards, metadata


def tables_on_ranks(
    infos: Sequence[EmbeddingShardingInfo],
    world_size: int,
    *,
    replicated: bool,
    splits_bags: bool,
) -> list[list[ShardedEmbeddingTable]]:
    """Which rows and columns each rank holds.

    Args:
        infos: the tables of one sharding.
        world_size: ``W``.
        replicated: whether every rank holds every table whole.
        splits_bags: whether the ids of a bag may be looked up on several ranks.

    Returns:
        Per rank its shards, in the tables' order and column by column.

    Raises:
        ValueError: a placement that does not cover the table, or outside the world.
    """
    ranks: list[list[ShardedEmbeddingTable]] = [[] for _ in range(world_size)]
    for info in infos:
        if replicated:
            for tables in ranks:
                tables.append(_shard(info, None, None, splits_bags=splits_bags))
            continue
        shards, metadata = _shards_of(info)
        for shard in sorted(shards, key=lambda shard: shard.shard_offsets[::-1]):
            rank = shard.placement.rank() if shard.placement is not None else None
            if rank is None or not 0 <= rank < world_size:
                raise ValueError(
                    f"table {info.embedding_config.name!r}: the plan puts a shard at "
                    f"{shard.placement}; there are ranks 0 to {world_size - 1}"
                )
            ranks[rank].append(_shard(info, shard, metadata, splits_bags=splits_bags))
    return ranks


class Layout:
    """Which rank holds which shards, and which ranks look up the same features.

    The ranks of a `Team` send one result together, in the place of the team's first rank.  The
    features that are sent, and the columns that arrive, are the teams', one after the other.

    Args:
        infos: the tables.
        env: who takes part.
        strategy_name: for messages.
        teams: see `Team`.
        replicated: whether every rank holds every table whole.
        splits_bags: whether the ranks of a team hold successive blocks of rows.

    Attributes:
        pg: the group of the ranks; None: nothing travels.
        world: where this rank stands.
        teams: see `Team`.
        tables_per_rank: ``[W]`` lists of shards.
        groups_per_rank: ``[W]`` lists of groups of shards that one operator serves.
        row_bounds: ``[F]``, where each rows' block begins within a team, and the end; empty unless
            ``splits_bags``.

    Raises:
        ValueError: a placement that does not fit the table, the ranks or the strategy.
    """

    def __init__(
        self,
        infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        strategy_name: str,
        teams: Callable[[World], list[Team]],
        *,
        replicated: bool,
        splits_bags: bool,
    ) -> None:
        self.pg: dist.ProcessGroup | None = env.process_group
        local_size = 1 if self.pg is None else get_local_size(env.world_size)
        self.world = World(env.rank, env.world_size, local_size)
        self.teams = teams(self.world)
        self.tables_per_rank = tables_on_ranks(
            infos, env.world_size, replicated=replicated, splits_bags=splits_bags
        )
        self.groups_per_rank = group_tables(self.tables_per_rank)
        self.row_bounds = [
            bounds
            for team in (self.teams if splits_bags else ())
            for bounds in self._row_bounds_of(team, strategy_name)
        ]

    def groups_per_team(self) -> list[list[GroupedEmbeddingConfig]]:
        """The groups of each team's first rank, which stand for all of its ranks' features."""
        return [self.groups_per_rank[team[0]] for team in self.teams]

    def features_per_team(self) -> list[int]:
        """How many features each team looks up."""
        return [sum(group.num_features() for group in groups) for groups in self.groups_per_team()]

    def dims_per_team(self) -> list[list[int]]:
        """Columns of each feature that each team looks up."""
        return [_dims(groups) for groups in self.groups_per_team()]

    def dims_per_rank(self) -> list[list[int]]:
        """``[W]``: columns of each feature that each rank looks up."""
        return [_dims(groups) for groups in self.groups_per_rank]

    def has_feature_processor(self) -> bool:
        """Whether ids get weights where they are looked up."""
        return any(
            group.has_feature_processor for groups in self.groups_per_rank for group in groups
        )

    def output_columns(self) -> list[OutputColumns]:
        """What the columns that arrive are, in order."""
        return [columns for groups in self.groups_per_team() for columns in output_columns(groups)]

    def _row_bounds_of(self, team: Team, strategy_name: str) -> list[list[int]]:
        bounds: list[list[int]] = []
        shards_per_rank = [
            [table for group in self.groups_per_rank[rank] for table in group.embedding_tables]
            for rank in team
        ]
        if len({len(shards) for shards in shards_per_rank}) > 1:
            names = sorted({table.name for tables in shards_per_rank for table in tables})
            raise ValueError(
                f"tables {names} are {strategy_name}: ranks {list(team)} must each hold one block "
                "of rows of each (which may be empty)"
            )
        for shards in zip(*shards_per_rank, strict=True):
            places = [table.local_metadata for table in shards]
            starts = [place.shard_offsets[0] for place in places if place is not None]
            ends = [
                place.shard_offsets[0] + place.shard_sizes[0]
                for place in places
                if place is not None
            ]
            alike = len({(table.name, table.local_cols) for table in shards}) == 1
            if not alike or starts != [0, *ends[:-1]] or ends[-1] != shards[0].num_embeddings:
                raise ValueError(
                    f"table {shards[0].name!r} is {strategy_name}: ranks {list(team)} must hold "
                    f"successive blocks of rows, but they begin at {starts}"
                )
            bounds += [[*starts, ends[-1]]] * shards[0].num_features()
        return bounds


def _dims(groups: Sequence[GroupedEmbeddingConfig]) -> list[int]:
    return [dim for group in groups for dim in group.embedding_dims()]
