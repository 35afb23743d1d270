"""Who takes part in sharding: the ranks, and the device of each."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tessera.errors import UserError
from tessera.training.distributed.comm.nodes import get_local_size, intra_and_cross_node_pg


class ShardingEnv:
    """Says which ranks take part and which of them this process is.

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

    @property
    def sharding_pg(self) -> dist.ProcessGroup | None:
        """The ranks over which tables are spread; None: they are whole here."""
        return self.process_group

    @property
    def ranks_per_node(self) -> int:
        """How many of the ranks over which tables are spread count as one node."""
        return 1 if self.process_group is None else get_local_size(self.world_size)

    def node_groups(
        self, device: torch.device | None = None
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The group of this rank's node, and the group of its peers on all nodes."""
        return intra_and_cross_node_pg(device)

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> ShardingEnv:
        """The environment of this rank in an initialized ``torch.distributed`` group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """The environment of rank ``rank`` of ``world_size``, without a process group."""
        return cls(world_size, rank)


def world_size_of_environment() -> int:
    """``WORLD_SIZE``, which torchrun sets; 1 without it.

    Raises:
        UserError: it is not a number.
    """
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise UserError(f"WORLD_SIZE={given}: give the number of ranks, or start with torchrun")
    return int(given)


def default_env() -> ShardingEnv:
    """Who takes part where nobody says so: the default process group, or this process alone.

    Raises:
        UserError: ``WORLD_SIZE`` says that there are several ranks, and they have no group.
    """
    if dist.is_available() and dist.is_initialized():
        assert dist.group.WORLD is not None, "an initialized torch.distributed has a group"
        return ShardingEnv.from_process_group(dist.group.WORLD)
    world_size = world_size_of_environment()
    if world_size > 1:
        raise without_group(world_size)
    return ShardingEnv.from_local(1, 0)


def without_group(world_size: int) -> UserError:
    """The error of several ranks that cannot reach one another."""
    return UserError(
        f"world_size is {world_size} but there is no process group; call "
        "torch.distributed.init_process_group, or start one process"
    )


def rank_device(device_type: str, rank: int) -> torch.device:
    """The device of local rank ``rank``: ``cpu``, or an accelerator with that index."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
