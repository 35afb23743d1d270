"""Who holds what under a plan, for the tables of one collection that share a strategy.

Legend: ``W`` ranks, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training.distributed.comm.codec_types import CommOp, QuantizedCommCodecs
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.sharding.interfaces import (
    EmbeddingShardingInfo,
    FeatureShardingMixIn,
    OutputColumns,
    Part,
)
from tessera.training.distributed.tables.table_shards import (
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
    kernel_named,
)
from tessera.training.modules.embedding_configs import EmbeddingTableConfig, PoolingType

Team = Sequence[int]
"""Ranks that look up the same features, each in its own rows: in the order of their rows."""


@dataclass(frozen=True)
class World:
    """This rank, the number of ranks, and the number of ranks per node."""

    rank: int
    size: int
    local_size: int


def _shard(
    info: EmbeddingShardingInfo,
    local: ShardMetadata | None,
    whole: ShardedTensorMetadata | None,
    pooling: PoolingType,
) -> ShardedEmbeddingTable:
    config = info.embedding_config
    rows, columns = (
        (config.num_embeddings, config.embedding_dim) if local is None else local.shard_sizes
    )
    if info.param_sharding.key_value_params is not None:
        raise ValueError(
            f"table {config.name!r}: the plan has key_value_params, and tables on disks or in stores are "
            "not here; leave them out"
        )
    own = {
        **{own.name: getattr(config, own.name) for own in fields(EmbeddingTableConfig)},
        "feature_names": list(config.feature_names),
        "embedding_names": list(config.embedding_names),
        "weight_init_max": config.get_weight_init_max(),
        "weight_init_min": config.get_weight_init_min(),
        "pooling": pooling,
    }
    return ShardedEmbeddingTable(
        **own,
        compute_kernel=kernel_named(config.name, info.param_sharding.compute_kernel),
        local_rows=rows,
        local_cols=columns,
        local_metadata=local,
        global_metadata=whole,
        fused_params=info.fused_params,
    )


def _among_all(
    shards: Sequence[ShardMetadata], pg: dist.ProcessGroup | None
) -> list[ShardMetadata]:
    """The shards with their ranks among all ranks, as tensors that are spread over ranks name them.

    A plan names ranks by their places in the group ``pg`` that it is made for.
    """
    if pg is None:
        return list(shards)
    ranks = dist.get_process_group_ranks(pg)
    if ranks == list(range(len(ranks))):
        return list(shards)

    def among_all(shard: ShardMetadata) -> ShardMetadata:
        assert shard.placement is not None, "a shard's place was looked at before"
        rank = shard.placement.rank()
        assert rank is not None, "a shard's place was looked at before"
        where = f"rank:{ranks[rank]}/{shard.placement.device()}"
        return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), where)

    return [among_all(shard) for shard in shards]


def _shards_of(info: EmbeddingShardingInfo) -> list[ShardMetadata]:
    """The shards of a table, as its plan lists them.

    Raises:
        ValueError: they are not listed, or do not cover the table.
    """
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
    return shards


def _whole_table(info: EmbeddingShardingInfo, shards: list[ShardMetadata]) -> ShardedTensorMetadata:
    config = info.embedding_config
    size = torch.Size([config.num_embeddings, config.embedding_dim])
    return ShardedTensorMetadata(shards, size, TensorProperties(dtype=info.param.dtype))


def tables_on_ranks(
    infos: Sequence[EmbeddingShardingInfo],
    world_size: int,
    *,
    replicated: bool,
    splits_bags: bool,
    pg: dist.ProcessGroup | None = None,
) -> list[list[ShardedEmbeddingTable]]:
    """``[W]`` lists of each rank's shards, in the tables' order and column by column.

    Their places in the tables name ranks among all ranks, of which ``pg`` may be a part.

    Raises:
        ValueError: a placement that does not cover the table, or outside the world.
    """
    ranks: list[list[ShardedEmbeddingTable]] = [[] for _ in range(world_size)]
    for info in infos:
        pooling = info.embedding_config.pooling
        if splits_bags and pooling is PoolingType.MEAN:
            # A rank that sees a part of a bag cannot divide by the bag's size: the mean is made
            # of the sum after the ranks' parts were added.
            pooling = PoolingType.SUM
        if replicated:
            for tables in ranks:
                tables.append(_shard(info, None, None, pooling))
            continue
        placed: list[tuple[int, ShardMetadata]] = []
        for shard in sorted(_shards_of(info), key=lambda shard: shard.shard_offsets[::-1]):
            rank = shard.placement.rank() if shard.placement is not None else None
            if rank is None or not 0 <= rank < world_size:
                raise ValueError(
                    f"table {info.embedding_config.name!r}: the plan puts a shard at "
                    f"{shard.placement}; there are ranks 0 to {world_size - 1}"
                )
            placed.append((rank, shard))
        whole = _whole_table(info, _among_all(_shards_of(info), pg))
        for (rank, _), local in zip(
            placed, _among_all([own for _, own in placed], pg), strict=True
        ):
            ranks[rank].append(_shard(info, local, whole, pooling))
    return ranks


def group_of(alike: list[ShardedEmbeddingTable]) -> GroupedEmbeddingConfig:
    """The group of shards that are like the first."""
    own = {own.name for own in fields(GroupedEmbeddingConfig)} - {"embedding_tables"}
    return GroupedEmbeddingConfig(
        **{name: getattr(alike[0], name) for name in own}, embedding_tables=alike
    )


def group_tables(
    tables_per_rank: list[list[ShardedEmbeddingTable]],
) -> list[list[GroupedEmbeddingConfig]]:
    """Group each rank's shards into those that one operator can serve.

    Alike are shards of one data type, pooling, weighting, feature processing, kernel and
    settings, and of one width if they are not pooled.  Groups come in the order of their first shard.
    """
    grouped_per_rank: list[list[GroupedEmbeddingConfig]] = []
    for tables in tables_per_rank:
        groups: dict[tuple[Any, ...], list[ShardedEmbeddingTable]] = {}
        for table in tables:
            settings = sorted((table.fused_params or {}).items(), key=lambda item: item[0])
            key = (
                table.data_type,
                table.pooling,
                table.is_weighted,
                table.has_feature_processor,
                table.compute_kernel,
                # By value: dicts have no hash, and equal ones print alike when keys are in order.
                repr(settings),
                # Vectors that are not pooled lie in rows of one length.
                table.local_cols if table.pooling is PoolingType.NONE else None,
            )
            groups.setdefault(key, []).append(table)
        grouped_per_rank.append([group_of(alike) for alike in groups.values()])
    return grouped_per_rank


def output_columns(groups: Sequence[GroupedEmbeddingConfig]) -> list[OutputColumns]:
    """What the columns of the output of a rank's lookup are, in order."""
    return [
        OutputColumns(
            name,
            0 if table.local_metadata is None else table.local_metadata.shard_offsets[1],
            table.local_cols,
        )
        for group in groups
        for table in group.embedding_tables
        for name in table.embedding_names
    ]


class Layout:
    """Which rank holds which shards, and which ranks look up the same features.

    The ranks of a `Team` send one result together, in the place of the team's first rank.  The
    features that are sent, and the columns that are received, are the teams', one after the other.

    Args:
        infos: the tables.
        env: who takes part.
        strategy_name: for messages.
        teams, replicated, splits_bags: as of the strategy.
        group: groups each rank's shards into those that one operator serves.

    Attributes:
        pg: the group of the ranks; None: nothing travels.
        node_groups: called with a device, the groups of this rank's node and of its peers on all nodes.
        world: where this rank stands.
        teams: see `Team`.
        tables_per_rank: ``[W]`` lists of shards.
        groups_per_rank: ``[W]`` lists of groups of shards that one operator serves.
        row_bounds: ``[F]``: the row at which each block of a team begins, and the end; empty
            unless ``splits_bags``.

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
        group: Callable[
            [list[list[ShardedEmbeddingTable]]], list[list[GroupedEmbeddingConfig]]
        ] = group_tables,
    ) -> None:
        self.pg: dist.ProcessGroup | None = env.sharding_pg
        self.node_groups = env.node_groups
        self.world = World(env.rank, env.world_size, env.ranks_per_node)
        self.teams = teams(self.world)
        self.tables_per_rank = tables_on_ranks(
            infos,
            env.world_size,
            replicated=replicated,
            splits_bags=splits_bags,
            pg=self.pg,
        )
        self.groups_per_rank = group(self.tables_per_rank)
        self.row_bounds = [
            bounds
            for team in (self.teams if splits_bags else ())
            for bounds in self._row_bounds_of(team, strategy_name)
        ]

    def groups_per_team(self) -> list[list[GroupedEmbeddingConfig]]:
        """The groups of each team's first rank, which stand for all of its ranks' features."""
        return [self.groups_per_rank[team[0]] for team in self.teams]

    def parts(self) -> list[Part]:
        """What comes team by team, with its feature."""
        return [
            Part(feature, own)
            for groups in self.groups_per_team()
            for feature, own in zip(feature_names(groups), output_columns(groups), strict=True)
        ]

    def features_per_team(self) -> list[int]:
        """How many features each team looks up."""
        return [len(dims) for dims in self.dims_per_team()]

    def dims_per_team(self) -> list[list[int]]:
        """Columns of each feature that each team looks up."""
        return [self.dims_per_rank()[team[0]] for team in self.teams]

    def dims_per_rank(self) -> list[list[int]]:
        """``[W]``: columns of each feature that each rank looks up."""
        return [
            [dim for group in groups for dim in group.embedding_dims()]
            for groups in self.groups_per_rank
        ]

    def refuse_blocks_of_different_widths(self) -> None:
        """Raise a ValueError for blocks of one table on one rank that differ in width."""
        for rank, tables in enumerate(self.tables_per_rank):
            widths: dict[str, set[int]] = {}
            for table in tables:
                widths.setdefault(table.name, set()).add(table.local_cols)
            for name, own in widths.items():
                if len(own) > 1:
                    raise ValueError(
                        f"table {name!r}: the plan puts blocks of {sorted(own)} columns on rank "
                        f"{rank}; unpooled blocks of a table on one rank are equally wide, so cut "
                        "it evenly or place them on different ranks"
                    )

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


def feature_names(groups: Sequence[GroupedEmbeddingConfig]) -> list[str]:
    """The features that the groups look up, in order."""
    return [name for group in groups for name in group.feature_names()]


class LaidOut(FeatureShardingMixIn):
    """A sharding whose features are those of its `layout`."""

    layout: Layout

    def feature_names(self) -> list[str]:
        """The features that are sent, in order."""
        return [part.feature for part in self.layout.parts()]

    def feature_names_per_rank(self) -> list[list[str]]:
        """The features that each rank receives."""
        return [feature_names(groups) for groups in self.layout.groups_per_rank]


@dataclass(frozen=True, kw_only=True)
class Way:
    """What the module is told that takes ids to the rows of a `Layout`, or vectors back."""

    layout: Layout
    pg: dist.ProcessGroup
    device: torch.device  # where this rank computes
    # How vectors of an operation are written for the network; None: as they are.
    codecs: Callable[[CommOp], QuantizedCommCodecs | None]
    order: ColumnOrder | None = None  # of pooled columns; None: as they come, team by team
    is_sequence: bool = False  # whether each id has a vector; otherwise bags are pooled
