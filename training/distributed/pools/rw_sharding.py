"""Pools cut by rows, the same for pools of any kind: who holds which rows, and their state."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

from tessera.training.distributed.comm.environment import ShardingEnv, without_group
from tessera.training.distributed.pools.ids import RwObjectPoolIDsDist
from tessera.training.distributed.pools.interfaces import (
    ObjectPoolReplicatedRwShardingContext,
    ObjectPoolRwShardingContext,
    ObjectPoolSharding,
    block_size,
    row_bounds,
)
from tessera.training.distributed.tables.shard_state import sharded_tensor


class RwBlocks:
    """Which ranks hold which rows of a pool.

    Args:
        env: who takes part.
        device: where rows live.
        pool_size: ``R``.
        replicated: whether each node holds all rows.

    Attributes:
        lookup_pg: the ranks that hold all rows once; None: this one alone.
        update_pg: all ranks.
        num_replicas: how often each row is there.
        rank: this one's place in ``lookup_pg``.
        bounds: where the block of each of them begins, and the end.

    Raises:
        UserError: several ranks without a process group.
    """

    def __init__(
        self, env: ShardingEnv, device: torch.device, pool_size: int, *, replicated: bool
    ) -> None:
        if env.process_group is None and env.world_size > 1:
            raise without_group(env.world_size)
        self.device, self.replicated, self.pool_size = device, replicated, pool_size
        self.lookup_pg = self.update_pg = env.process_group
        if replicated and env.process_group is not None:
            self.lookup_pg, _ = env.node_groups(device)
        ranks = 1 if self.lookup_pg is None else self.lookup_pg.size()
        self.rank = 0 if self.lookup_pg is None else self.lookup_pg.rank()
        self.num_replicas = env.world_size // ranks
        self.bounds = row_bounds(pool_size, ranks)
        self._block_size = torch.tensor([block_size(pool_size, ranks)], device=device)

    @property
    def local_pool_size(self) -> int:
        """Rows that are here."""
        return self.bounds[self.rank + 1] - self.bounds[self.rank]

    def update_ids_dist(self) -> RwObjectPoolIDsDist:
        """Sends ids to every copy of their rows."""
        ranks = len(self.bounds) - 1
        return RwObjectPoolIDsDist(
            self.update_pg,
            is_update=True,
            bucketize_world_size=ranks,
            num_replicas=self.num_replicas,
        )

    def lookup_ids_dist(self) -> RwObjectPoolIDsDist:
        """Sends ids to the nearest copy of their rows."""
        return RwObjectPoolIDsDist(self.lookup_pg, is_update=False)

    def context(self) -> ObjectPoolRwShardingContext:
        """A new context of one lookup or update."""
        kind = (
            ObjectPoolReplicatedRwShardingContext
            if self.replicated
            else ObjectPoolRwShardingContext
        )
        return kind(block_size=self._block_size)

    def whole(self, own: Tensor) -> Tensor:
        """``own``, this rank's rows ``[local_pool_size, ...]``, as a ``ShardedTensor`` of all rows."""
        if self.lookup_pg is None:
            return own
        rest = list(own.shape[1:])
        ranks = dist.get_process_group_ranks(self.lookup_pg)
        places = [
            ShardMetadata(
                [first] + [0] * len(rest), [end - first, *rest], f"rank:{rank}/{own.device}"
            )
            for rank, (first, end) in zip(ranks, pairwise(self.bounds), strict=True)
        ]
        metadata = ShardedTensorMetadata(
            places, torch.Size([self.pool_size, *rest]), TensorProperties(dtype=own.dtype)
        )
        return sharded_tensor([(places[self.rank], own)], metadata, self.lookup_pg)

    def own(self, value: Any) -> Any:
        """This rank's rows of a tensor of all rows, whole or a ``ShardedTensor`` with the same blocks."""
        first, end = self.bounds[self.rank], self.bounds[self.rank + 1]
        if isinstance(value, ShardedTensor):
            shards = value.local_shards()
            found = [shard.tensor for shard in shards if shard.metadata.shard_offsets[0] == first]
            return found[0] if found else value
        if isinstance(value, Tensor) and value.size(0) == self.pool_size:
            return value[first:end]
        return value


class RwObjectPoolSharding(ObjectPoolSharding):
    """A pool cut by rows, whatever a row is; see `ObjectPoolSharding`.

    Attributes:
        blocks: which rows are where.
        local_pool_size: rows that are here.
    """

    def __init__(self, blocks: RwBlocks) -> None:
        self.blocks = blocks
        self.local_pool_size = blocks.local_pool_size

    def create_update_ids_dist(self) -> RwObjectPoolIDsDist:
        """Sends the ids of rows that are written."""
        return self.blocks.update_ids_dist()

    def create_lookup_ids_dist(self) -> RwObjectPoolIDsDist:
        """Sends the ids of rows that are read."""
        return self.blocks.lookup_ids_dist()

    def get_sharded_states_to_register(self, lookup: nn.Module) -> Iterable[tuple[str, Tensor]]:
        """The tensors of all rows, by name."""
        return sharded_states(lookup, self.blocks)

    def create_context(self) -> ObjectPoolRwShardingContext:
        """A new context of one lookup or update."""
        return self.blocks.context()


def sharded_states(module: nn.Module, blocks: RwBlocks) -> Iterable[tuple[str, Tensor]]:
    """The stored tensors of ``module``, which holds this rank's rows, as tensors of all rows."""
    for name, own in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - torch has no other way to ask
            yield name, blocks.whole(own)


def keep_whole_states(module: nn.Module, blocks: RwBlocks) -> None:
    """Have the state dicts of ``module`` name all rows of the pool, of which its buffers hold this rank's.

    Loading takes whole tensors too, so a state moves between one process and several.
    """

    def tell(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, whole in sharded_states(module, blocks):
            state[prefix + name] = whole

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, _own in module.named_buffers(recurse=False):
            if prefix + name in state:
                state[prefix + name] = blocks.own(state[prefix + name])

    module.register_state_dict_post_hook(tell)  # type: ignore[no-untyped-call] # torch leaves it untyped
    module.register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call] # torch leaves it untyped
