"""Ratings of plans."""

from __future__ import annotations

from tessera.training.distributed.planner.types import (
    PerfModel,
    ShardingOption,
    Topology,
    per_rank,
)


class NoopPerfModel(PerfModel):
    """The slowest rank's time in milliseconds: the others wait for it."""

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' ``perf.total`` over the ranks."""
        return max(per_rank(plan, self._ranks, lambda shard: shard.time.total))


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
