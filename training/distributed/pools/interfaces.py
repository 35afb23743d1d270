"""What the steps of a pool over ranks share, and what says how a pool is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.streamable import Multistreamable


@dataclass
class ObjectPoolShardingContext(Multistreamable):
    """What the steps of one lookup or update share.

    Legend: ``N`` ids, ``W`` ranks.

    Attributes:
        ids_before_input_dist: ``[N]``, as they were given.
        num_ids_each_rank_to_receive: ``[W]``, rows that come from each rank.
        num_ids_each_rank_to_send: ``[W]``, rows that go to each rank.
        bucketize_permute: ``[N]``, the place in the given order of each id as it was sent.
        unbucketize_permute: ``[N]``, the place among those sent of each id as it was given.
    """

    ids_before_input_dist: Tensor | None = None
    num_ids_each_rank_to_receive: Tensor | None = None
    num_ids_each_rank_to_send: Tensor | None = None
    bucketize_permute: Tensor | None = None
    unbucketize_permute: Tensor | None = None


@dataclass
class RwShardingContext(Multistreamable):
    """What is known of the blocks of rows.

    Attributes:
        block_size: ``[1]``, rows of a block; the last ones may have fewer.
    """

    block_size: Tensor | None = None


@dataclass
class ObjectPoolRwShardingContext(ObjectPoolShardingContext, RwShardingContext):
    """The context of pools that are cut by rows."""


@dataclass
class ObjectPoolReplicatedRwShardingContext(ObjectPoolRwShardingContext):
    """The context of pools that each node holds whole, cut by rows."""


@dataclass
class TensorPoolRwShardingContext(ObjectPoolRwShardingContext):
    """The context of pools of vectors that are cut by rows."""


class ObjectPoolSharding(ABC):
    """How a pool is cut, and how ids and rows travel; one strategy and one kind of pool each."""

    @abstractmethod
    def create_update_ids_dist(self) -> nn.Module:
        """Sends the ids of rows that are written."""

    @abstractmethod
    def create_update_values_dist(self) -> nn.Module:
        """Sends what is written."""

    @abstractmethod
    def create_lookup_ids_dist(self) -> nn.Module:
        """Sends the ids of rows that are read."""

    @abstractmethod
    def create_lookup_values_dist(self) -> nn.Module:
        """Sends what was read back."""

    @abstractmethod
    def get_sharded_states_to_register(self, lookup: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """The pool's tensors as a state dict has them, by name.

        Args:
            lookup: holds this rank's rows as its buffers.
        """

    @abstractmethod
    def create_context(self) -> ObjectPoolShardingContext:
        """A new context of one lookup or update."""


class InferObjectPoolSharding(ABC):
    """How a pool is cut over the devices of one process.

    Args:
        pool_size: ``R``.
        env: ``world_size`` devices; no process group is needed.
        device: where ids come from and rows go to.
        memory_capacity_per_rank: the devices' memories in any unit: each gets rows in proportion, rounded
            down, and the last one the rest; None: blocks of equal size.

    Attributes:
        local_pool_size_per_rank: ``[W]``, rows of each device.
        row_bounds: ``[W + 1]``, the first row of each device, and the end.

    Raises:
        ValueError: as many capacities as devices are needed, none negative and one positive.
    """

    def __init__(
        self,
        pool_size: int,
        env: ShardingEnv,
        device: torch.device,
        memory_capacity_per_rank: list[int] | None = None,
    ) -> None:
        self._env, self._device = env, device
        given = memory_capacity_per_rank
        if given is None:
            bounds = row_bounds(pool_size, env.world_size)
        else:
            if len(given) != env.world_size or min(given) < 0 or not sum(given):
                raise ValueError(
                    f"memory_capacity_per_rank is {given}; give one capacity for each of {env.world_size} "
                    "devices, none of them negative and not all of them 0"
                )
            total = sum(given)
            rows = [pool_size * capacity // total for capacity in given[:-1]]
            bounds = [sum(rows[:place]) for place in range(len(given))] + [pool_size]
        self.row_bounds = bounds
        self.local_pool_size_per_rank = [end - first for first, end in pairwise(bounds)]

    @abstractmethod
    def create_lookup_ids_dist(self) -> nn.Module:
        """Sends ids to the devices that hold their rows."""

    @abstractmethod
    def create_lookup_values_dist(self) -> nn.Module:
        """Gathers rows on one device."""


def row_bounds(pool_size: int, ranks: int) -> list[int]:
    """``[ranks + 1]``: where the block of each rank begins, and the end; the last blocks may be small or empty."""
    block = block_size(pool_size, ranks)
    return [min(rank * block, pool_size) for rank in range(ranks + 1)]


def block_size(pool_size: int, ranks: int) -> int:
    """Rows of a whole block."""
    return max(-(-pool_size // ranks), 1)
