"""Ratings of plans."""

from __future__ import annotations

import numpy as np

from tessera.training.distributed.planner.types import PerfModel, ShardingOption, Topology


class NoopPerfModel(PerfModel):
    """The slowest rank's time in milliseconds: the others wait for it."""

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.world_size

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' ``perf.total`` over the ranks."""
        per_rank = np.zeros(self._ranks)
        for option in plan:
            for shard in option.shards:
                assert shard.perf is not None
                assert shard.rank is not None
                per_rank[shard.rank] += shard.perf.total
        return float(per_rank.max())


class NoopStorageModel(PerfModel):
    """The fullest rank's memory in bytes, device memory before host memory."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def rate(self, plan: list[ShardingOption]) -> float:
        """Largest sum of the shards' storage over the ranks."""
        per_rank = np.zeros(self._topology.world_size)
        on_gpu = self._topology.compute_device == "cuda"
        for option in plan:
            for shard in option.shards:
                assert shard.storage is not None
                assert shard.rank is not None
                per_rank[shard.rank] += shard.storage.hbm if on_gpu else shard.storage.ddr
        return float(per_rank.max())
