"""Ratings of plans."""

from __future__ import annotations

from collections.abc import Hashable

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.types import (
    PerfModel,
    ShardingOption,
    Topology,
    per_rank,
)
from tessera.training.distributed.sharding.registry import strategy_of


class NoopPerfModel(PerfModel):
    """The slowest rank's time in milliseconds: the others wait for it.

    On several ranks every way in which a module cuts tables adds its fixed part
    (`constants.WAY_MS_ON_CPU`, `constants.WAY_MS_ON_GPU`), so that tables are not cut in one more way for
    less than that.  Pooled tables that are table-wise and column-wise are served together and are one
    way, see `ShardingStrategy.sent_as`.

    Data-parallel tables send neither ids nor vectors.  On CPUs they add no part beside other tables.  On
    GPUs they add one, with or without others, for their own lookup and the sum of their gradients.  A
    module that has no other tables counts as one way besides: tables do not become data-parallel, which
    changes by what they are updated, to save a fixed part.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size
        on_cpus = topology.compute_device == "cpu"
        self._replicas_count = not on_cpus
        way_ms = constants.WAY_MS_ON_CPU if on_cpus else constants.WAY_MS_ON_GPU
        self._way_ms = way_ms if topology.world_size > 1 else 0.0

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' ``perf.total`` over the ranks, and what the plan's ways cost."""
        slowest = max(per_rank(plan, self._ranks, lambda shard: shard.time.total))
        return slowest + self._way_ms * self._count_ways(plan)

    def _count_ways(self, plan: list[ShardingOption]) -> int:
        ways: dict[str, set[Hashable]] = {option.path: set() for option in plan}
        with_replicas: set[str] = set()
        for option in plan:
            strategy = strategy_of(option.sharding_type)
            if strategy.replicated:
                with_replicas.add(option.path)
            else:
                together = strategy.sent_as if option.is_pooled else None
                ways[option.path].add(together or strategy.name)
        count = sum(max(1, len(own)) for own in ways.values())
        return count + len(with_replicas) if self._replicas_count else count


class NoopStorageModel(PerfModel):
    """The fullest rank's memory in bytes, device memory before host memory."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' storage over the ranks."""
        topology = self._topology
        return max(
            per_rank(
                plan, topology.world_size, lambda shard: shard.used.on(topology.compute_device)
            )
        )
