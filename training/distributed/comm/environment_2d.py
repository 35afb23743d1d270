"""Who takes part where a model is spread over groups of ranks and each group holds all of it.

The ranks are a grid.  Those of a row, a sharding group, hold the shards of one whole model; those of a
column, a replica group, hold the same shards.  With 2 groups of 4 among 8 ranks:

* by default the ranks of a group are spread, ``[0, 2, 4, 6]`` and ``[1, 3, 5, 7]``, so that the replicas of
  a shard are neighbours, which average it over the links within a node;
* with ``use_inter_host_allreduce`` they are neighbours themselves, ``[0, 1, 2, 3]`` and ``[4, 5, 6, 7]``:
  ids and vectors stay within a node, and the averages go between nodes.

The names are TorchRec's; arXiv:2504.21254 describes the method.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.nodes import get_local_size, set_node_group_size


def sharding_groups(
    world_size: int, sharding_group_size: int, *, use_inter_host_allreduce: bool = False
) -> list[list[int]]:
    """The ranks of each sharding group, ``[groups][sharding_group_size]``.

    Raises:
        UserError: groups of this size do not make up the world.
    """
    if sharding_group_size < 1 or world_size % sharding_group_size:
        raise UserError(
            f"sharding_group_size is {sharding_group_size} and world_size {world_size}; give a divisor "
            "of the number of ranks"
        )
    groups = world_size // sharding_group_size
    if use_inter_host_allreduce:
        firsts = range(0, world_size, sharding_group_size)
        return [list(range(first, first + sharding_group_size)) for first in firsts]
    return [list(range(group, world_size, groups)) for group in range(groups)]


def replica_mesh(device_type: str, groups: list[list[int]]) -> DeviceMesh:
    """The grid of all ranks, its dimensions called ``replicate`` and ``shard``; every rank calls it.

    Args:
        device_type: where tensors live.
        groups: as of `sharding_groups`.
    """
    return DeviceMesh(device_type, groups, mesh_dim_names=("replicate", "shard"))


class ShardingEnv2D(ShardingEnv):
    """The place of this rank in its sharding group, and the groups that it is in.

    ``world_size`` and ``rank`` are those of the sharding group; ``process_group`` is the group of all
    ranks, over which the gradients of what is not sharded are averaged.

    Args:
        sharding_pg: the ranks over which tables are spread.
        replica_pg: the ranks that hold the same shards.
        global_pg: all ranks.
        device_mesh: the grid of all ranks, ``[replicas, ranks per sharding group]``.
        node_group_size: how many successive ranks of a sharding group count as a node; None: as many as
            the launcher's environment says, or all where that number does not divide the group.
        use_inter_host_allreduce: whether sharding groups are of successive ranks.

    Attributes:
        global_rank, global_world_size: this rank among all of them, and their number.
        replica_pg, global_pg, device_mesh, node_group_size, use_inter_host_allreduce: as given.

    Raises:
        ValueError: a mesh that has not two dimensions, or nodes that do not make up the group.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        sharding_pg: dist.ProcessGroup,
        replica_pg: dist.ProcessGroup,
        global_pg: dist.ProcessGroup,
        device_mesh: DeviceMesh,
        node_group_size: int | None = None,
        use_inter_host_allreduce: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        super().__init__(sharding_pg.size(), sharding_pg.rank(), global_pg)
        if device_mesh.ndim != 2:
            raise ValueError(
                f"device_mesh has {device_mesh.ndim} dimensions; give one of (replicate, shard)"
            )
        if node_group_size is not None and (
            node_group_size < 1 or self.world_size % node_group_size
        ):
            raise ValueError(
                f"node_group_size is {node_group_size} in sharding groups of {self.world_size} ranks; "
                "give a divisor of that number"
            )
        self._sharding_pg = sharding_pg
        self.replica_pg, self.global_pg = replica_pg, global_pg
        self.global_rank, self.global_world_size = global_pg.rank(), global_pg.size()
        self.device_mesh = device_mesh
        self.node_group_size = node_group_size
        self.use_inter_host_allreduce = use_inter_host_allreduce
        self._node_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None

    @property
    def sharding_pg(self) -> dist.ProcessGroup:
        """The ranks over which tables are spread."""
        return self._sharding_pg

    @property
    def ranks_per_node(self) -> int:
        """How many successive ranks of a sharding group count as one node."""
        if self.node_group_size is not None:
            return self.node_group_size
        local_size = get_local_size(self.global_world_size)
        return local_size if self.world_size % local_size == 0 else self.world_size

    def num_sharding_groups(self) -> int:
        """How many copies of the sharded model there are."""
        return self.global_world_size // self.world_size

    def node_groups(
        self, device: torch.device | None = None
    ) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """See `intra_and_cross_node_pg_2D`."""
        return intra_and_cross_node_pg_2D(self, device)

    def made_node_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The groups of `node_groups`, made at the first call."""
        if self._node_groups is None:
            backend = dist.get_backend(self._sharding_pg)
            size, own = self.ranks_per_node, []
            for group in self.device_mesh.mesh.tolist():
                nodes = [group[first : first + size] for first in range(0, len(group), size)]
                # Every rank takes part in making every group, its own or not.
                for ranks in (*nodes, *(list(peers) for peers in zip(*nodes, strict=True))):
                    made = dist.new_group(ranks, backend=backend)
                    if self.global_rank in ranks:
                        own.append(made)
            self._node_groups = own[0], own[1]
        return self._node_groups


def intra_and_cross_node_pg_2D(  # noqa: N802 - the name TorchRec users know
    env: ShardingEnv2D, device: torch.device | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Within this rank's sharding group, the group of its node, and that of its peers on all nodes.

    A node here is ``env.ranks_per_node`` successive ranks of the sharding group.  In a group of ranks
    ``[0, 2, 4, 6]`` with 2 ranks per node, rank 4 gets the groups of ranks (4, 6) and (0, 4).  All ranks of
    all groups must call this together the first time; later calls return the same groups.

    Args:
        env: the groups.
        device: where tensors live; on ``meta`` nothing travels and both groups are None.
    """
    if device is not None and device.type == "meta":
        return None, None
    set_node_group_size(env.ranks_per_node)
    return env.made_node_groups()
