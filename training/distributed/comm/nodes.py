"""Where a rank stands: its node, its place there, and the groups within and across nodes."""

from __future__ import annotations

import os
from functools import cache

import torch
import torch.distributed as dist

_LOCAL_SIZE_VARIABLES = (
    "LOCAL_WORLD_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
)


def _first_number(variables: tuple[str, ...]) -> int | None:
    """The first of these environment variables that holds a number that is not negative."""
    for variable in variables:
        text = os.environ.get(variable, "")
        if text.isdecimal():
            return int(text)
    return None


def get_local_size(world_size: int | None = None) -> int:
    """Ranks per node, as the launcher's environment says.

    Args:
        world_size: number of ranks; None: the default group's.

    Returns:
        The environment's number if it divides ``world_size``; otherwise all ranks count as one
        node's.
    """
    world_size = dist.get_world_size() if world_size is None else world_size
    local_size = _first_number(_LOCAL_SIZE_VARIABLES)
    return local_size if local_size and world_size % local_size == 0 else world_size


_node_group_size: int | None = None


def set_node_group_size(size: int | None) -> None:
    """Say how many ranks count as a node from now on; None: what the launcher's environment says."""
    global _node_group_size  # noqa: PLW0603 - one number for the process, as in the reference
    _node_group_size = size


def get_node_group_size(world_size: int | None = None) -> int:
    """Ranks per node within a sharding group, once 2D parallelism has made such groups.

    Args:
        world_size: as of `get_local_size`, whose number is returned before.
    """
    return get_local_size(world_size) if _node_group_size is None else _node_group_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """This rank's place on its node; worked out from ``rank`` if the environment has none."""
    local_size = get_local_size(world_size)
    local_rank = _first_number(_LOCAL_RANK_VARIABLES)
    if local_rank is not None and local_rank < local_size:
        return local_rank
    return (dist.get_rank() if rank is None else rank) % local_size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Which node the rank is on, 0 to `get_num_groups` - 1."""
    return (dist.get_rank() if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes."""
    world_size = dist.get_world_size() if world_size is None else world_size
    return world_size // get_local_size(world_size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this rank's node, and the group of its peers on all nodes.

    With 2 nodes of 3 ranks, rank 4 gets the groups of ranks (3, 4, 5) and (1, 4).  All ranks of
    the default group must call this together the first time; later calls return the same groups.

    Args:
        device: where tensors live; on ``meta`` nothing travels and both groups are None.
        backend: of the new groups; None: the default group's.
    """
    if device is not None and device.type == "meta":
        return None, None
    default = dist.group.WORLD
    assert default is not None, "torch.distributed is initialized"
    return _node_groups(default, get_local_size(), backend or dist.get_backend())


@cache
def _node_groups(
    default: dist.ProcessGroup,  # a new default group makes new node groups
    local_size: int,
    backend: str,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    world_size, rank = default.size(), default.rank()
    intra = [list(range(first, first + local_size)) for first in range(0, world_size, local_size)]
    cross = [list(range(first, world_size, local_size)) for first in range(local_size)]
    # Every rank takes part in making every group, its own or not.
    made = [(ranks, dist.new_group(ranks, backend=backend)) for ranks in (*intra, *cross)]
    own = [group for ranks, group in made if rank in ranks]
    return own[0], own[1]
