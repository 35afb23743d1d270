"""Who takes part in sharding: the ranks, and the device of each."""

from __future__ import annotations

import torch
import torch.distributed as dist


class ShardingEnv:
    """Who takes part.

    Args:
        world_size: number of ranks.
        rank: this process's place among them.
        pg: ``torch.distributed``'s group; None: no communication (one rank, or one process that
            serves several devices).

    Raises:
        ValueError: a rank outside the world.
    """

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} in a world of {world_size}; give 0 to world_size - 1")
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """From an initialized ``torch.distributed`` group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """Without a group."""
        return cls(world_size, rank)


def rank_device(device_type: str, rank: int) -> torch.device:
    """The device of local rank ``rank``: ``cpu``, or an accelerator with that index."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
