"""Ratings of plans."""

from __future__ import annotations

from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.types import (
    PerfModel,
    ShardingOption,
    Topology,
    per_rank,
)


class NoopPerfModel(PerfModel):
    """The slowest rank's time in milliseconds: the others wait for it.

    On several ranks of CPUs every way in which a module cuts tables adds its fixed part
    (`constants.WAY_MS_ON_CPU`), so that tables are not cut in one more way for less than that.
    Data-parallel tables send neither ids nor vectors and add none beside other tables.  A module that
    has no others counts as one way: tables do not become data-parallel, which changes by what they
    are updated, to save a fixed part.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size
        on_cpus = topology.compute_device == "cpu" and topology.world_size > 1
        self._way_ms = constants.WAY_MS_ON_CPU if on_cpus else 0.0

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' ``perf.total`` over the ranks, and what the plan's ways cost."""
        slowest = max(per_rank(plan, self._ranks, lambda shard: shard.time.total))
        ways: dict[str, set[str]] = {each.path: set() for each in plan}
        for each in plan:
            if each.sharding_type != "data_parallel":
                ways[each.path].add(each.sharding_type)
        return slowest + self._way_ms * sum(max(1, len(own)) for own in ways.values())


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
