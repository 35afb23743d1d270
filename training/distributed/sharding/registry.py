"""The registry of sharding strategies: each is one record that holds all that Tessera knows of it.

What travels is said by functions of a `Way` that make the module which does it; strategies choose
these functions from `ids`, `pooled_vectors` and `sequence_sharding`, or bring their own.

The files of `tessera.training.distributed.sharding.strategies` register one record each and are
imported when a strategy is first asked for.  A program adds its own with `register`, on every rank:

    register(ShardingStrategy(name="row_wise_reversed", ...))

Plans, constraints and configs then take its name, sharders offer it, the planner considers it, and
pooled and unpooled collections are sharded by it.  docs/extending.md has a complete example.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum, unique
from functools import cache
from typing import Any

from torch import Tensor

from tessera.errors import unknown_name
from tessera.training.distributed.plan.plan_types import ShardingType
from tessera.training.distributed.plan.shard_sizes import MIN_CW_DIM, Piece, TableToCut
from tessera.training.distributed.sharding.costs import Step, Traffic
from tessera.training.distributed.sharding.ids import IdsDist
from tessera.training.distributed.sharding.interfaces import BaseEmbeddingDist
from tessera.training.distributed.sharding.layout import Team, Way, World
from tessera.training.distributed.sharding.pooled_vectors import PooledDist
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel

UnpooledDist = BaseEmbeddingDist[Any, Tensor, Tensor]


@unique
class PartitionByType(str, Enum):
    """On which ranks the planner may put the shards of a table; equal to its name in lower case."""

    DEVICE = "device"  # any shard on any rank
    HOST = "host"  # all shards on the ranks of one host
    UNIFORM = "uniform"  # shard ``i`` on rank ``i``
    MULTI_HOST = "multi_host"  # groups of shards, each on one host


def trained_kernels(device_type: str) -> list[str]:
    """All kernels that train on a kind of device."""
    kernels = [EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED]
    if device_type == "cuda":
        kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
    return [kernel.value for kernel in kernels]


def dense_kernels(device_type: str) -> list[str]:
    """Tables as ordinary parameters only."""
    del device_type
    return [EmbeddingComputeKernel.DENSE.value]


@dataclass(frozen=True, kw_only=True)
class ShardingStrategy:
    """One way of spreading tables over ranks.

    Attributes:
        name: what plans and constraints call it; one of `ShardingType` for TorchRec's.
        short_name: what tables of text call it.
        cut: the shards of a table, as the planner proposes them.
        by_hand: called with what a person chooses (a rank, sizes, ...), returns a
            `by_hand.ParameterShardingGenerator`.
        placed: on which ranks the planner may put the shards.
        teams: the sets of ranks that look up the same features.
        ids: makes the module that sends ids.
        pooled: makes the module that sends pooled vectors back.
        unpooled: makes the module that sends the vectors of single ids back.
        traffic: what a rank looks up and sends in a step.
        kernels: the compute kernels on a kind of device; none: it is not offered there.
        replicated: whether every rank holds every table whole; gradients are then averaged.
        splits_bags: whether the ids of one bag are looked up on several ranks.  A team's ranks
            then hold successive blocks of rows, and a mean is made of the sum of their parts.
        splits_rows: whether the columns of one row lie on several ranks.
        least_ranks: with fewer ranks the planner does not consider it, since another strategy is
            then equal to it.
        least_hosts: the same for hosts.
        preference: strategies are listed in the order of this number; of ways that cost the same,
            the planner takes the one that is listed first.
    """

    name: str
    short_name: str
    cut: Callable[[TableToCut], list[Piece]]
    by_hand: Callable[..., Any]
    placed: PartitionByType
    teams: Callable[[World], list[Team]]
    ids: Callable[[Way], IdsDist]
    pooled: Callable[[Way], PooledDist]
    unpooled: Callable[[Way], UnpooledDist]
    traffic: Callable[[Step], Traffic]
    kernels: Callable[[str], list[str]] = trained_kernels
    replicated: bool = False
    splits_bags: bool = False
    splits_rows: bool = False
    least_ranks: int = 1
    least_hosts: int = 1
    preference: int = 100

    @property
    def kernels_know_it_as(self) -> ShardingType | None:
        """The type that lookups and kernels are told; None: one that they do not know."""
        if self.replicated:
            return ShardingType.DATA_PARALLEL
        known = {kind.value: kind for kind in ShardingType}
        return known.get(self.name)

    @property
    def sent_as(self) -> Hashable | None:
        """Equal for strategies whose pooled tables one sharding can serve; None: no others' tables.

        They have the same teams and the same ways there and back.  Where parts of bags or gradients of
        copies are added up between ranks, the sums may depend on what else is added in the same call,
        so those are served by themselves.
        """
        if self.replicated or self.splits_bags:
            return None
        return self.teams, self.ids, self.pooled


_REGISTERED: dict[str, ShardingStrategy] = {}


def register(strategy: ShardingStrategy) -> ShardingStrategy:
    """Make a strategy known under its name, and return it.

    Raises:
        ValueError: another strategy has the name.
    """
    known = _REGISTERED.setdefault(strategy.name, strategy)
    if known != strategy:
        raise ValueError(f"a strategy named {strategy.name!r} is registered; take another name")
    return strategy


@cache
def _find_own() -> None:
    package = importlib.import_module("tessera.training.distributed.sharding.strategies")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


def strategies() -> list[ShardingStrategy]:
    """All that are known, by ``preference``; of equals, in the order of their registration."""
    _find_own()
    return sorted(_REGISTERED.values(), key=lambda strategy: strategy.preference)


def strategy_of(name: str | ShardingType, field: str = "sharding_type") -> ShardingStrategy:
    """The strategy of a name.

    Args:
        name: as plans and constraints spell it.
        field: where the name was found, for the message.

    Raises:
        UserError: an unknown name; the message says the nearest one.
    """
    wanted = name.value if isinstance(name, ShardingType) else name
    _find_own()
    if wanted in _REGISTERED:
        return _REGISTERED[wanted]
    raise unknown_name(field, wanted, [strategy.name for strategy in strategies()])


def calculate_shard_sizes_and_offsets(
    tensor: Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """The shards of a table under a strategy, as the planner proposes them.

    Args:
        tensor: ``[rows, columns]``; only its shape is read.
        world_size: ranks.
        local_world_size: ranks per host.
        sharding_type: the strategy's name.
        col_wise_shard_dim: the fewest columns of a block of columns; None: the planner's
            ``MIN_CW_DIM``.

    Returns:
        ``[rows, columns]`` and ``[first row, first column]`` of each shard.

    Raises:
        ValueError: there is no such strategy.
    """
    rows, columns = tensor.shape
    table = TableToCut(
        rows=rows,
        columns=columns,
        world_size=world_size,
        local_size=local_world_size,
        min_partition=col_wise_shard_dim or MIN_CW_DIM,
    )
    pieces = strategy_of(sharding_type).cut(table)
    return [list(size) for size, _ in pieces], [list(offset) for _, offset in pieces]
