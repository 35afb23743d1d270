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
    (`constants.WAY_MS_ON_CPU`, and `constants.CUT_ROWS_MS_ON_CPU` where it cuts rows), so that tables are not cut in
    one more way for less than that.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size
        self._ways_cost = topology.compute_device == "cpu" and topology.world_size > 1

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' ``perf.total`` over the ranks, and what the plan's ways cost."""
        slowest = max(per_rank(plan, self._ranks, lambda shard: shard.time.total))
        return slowest + (_ways_ms_on_cpu(plan) if self._ways_cost else 0.0)


def _ways_ms_on_cpu(plan: list[ShardingOption]) -> float:
    ways = {(option.path, option.sharding_type) for option in plan}
    by_rows = {
        (option.path, option.sharding_type)
        for option in plan
        if any(shard.size[0] < option.tensor.shape[0] for shard in option.shards)
    }
    return len(ways) * constants.WAY_MS_ON_CPU + len(by_rows) * constants.CUT_ROWS_MS_ON_CPU


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
