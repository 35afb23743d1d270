"""Pools of bags cut by rows.

Between ranks bags travel by row: the bags of all features of a row are neighbours.

Legend: ``N`` rows, ``F`` features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.pools.ids import InferRwObjectPoolInputDist
from tessera.training.distributed.pools.interfaces import (
    InferObjectPoolSharding,
    ObjectPoolRwShardingContext,
)
from tessera.training.distributed.pools.rw_sharding import RwBlocks, RwObjectPoolSharding
from tessera.training.distributed.travel.rows_all_to_all import JaggedTensorAllToAll
from tessera.training.modules import pool_rows
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def _bags(ctx: ObjectPoolRwShardingContext, features: int) -> tuple[Tensor, Tensor]:
    """Bags that go to each rank and that come from each, ``[W]``."""
    send, receive = ctx.num_ids_each_rank_to_send, ctx.num_ids_each_rank_to_receive
    assert send is not None, "ids go before values"
    assert receive is not None, "ids go before values"
    return send * features, receive * features


class RwKeyedJaggedTensorPoolLookupValuesDist(nn.Module):
    """Sends bags that were read back to the ranks that asked.

    Args:
        num_features: ``F``.
        env: the ranks that hold all rows once.
    """

    def __init__(self, num_features: int, env: ShardingEnv) -> None:
        super().__init__()
        self._features, self._pg = num_features, env.process_group

    def forward(
        self, ctx: ObjectPoolRwShardingContext, jagged_tensor: JaggedTensor
    ) -> Awaitable[JaggedTensor]:
        """Begin to send ``jagged_tensor``, the ``N * F`` bags by row of the ids as they came.

        Returns:
            Awaitable of the bags by row in the order of the ids as they were sent.
        """
        return JaggedTensorAllToAll(jagged_tensor, *_bags(ctx, self._features), self._pg)


class RwKeyedJaggedTensorPoolUpdateValuesDist(nn.Module):
    """Sends bags that are written to the ranks that hold their rows.

    Args:
        num_features: ``F``.
        env: all ranks.
        device: where bags live.
        num_replicas: how often each row is there.
    """

    def __init__(
        self, num_features: int, env: ShardingEnv, device: torch.device, num_replicas: int = 1
    ) -> None:
        super().__init__()
        del device
        self._features, self._pg, self._replicas = num_features, env.process_group, num_replicas

    def forward(
        self, values: KeyedJaggedTensor, ctx: ObjectPoolRwShardingContext
    ) -> Awaitable[JaggedTensor]:
        """Begin to send ``values``, one bag of each feature for each id as they were given.

        Returns:
            Awaitable of the bags by row in the order of the ids as they came.
        """
        assert ctx.bucketize_permute is not None, "ids go before values"
        lengths, ids, weights = pool_rows.bags_by_row(values, ctx.bucketize_permute)
        if self._replicas > 1:
            lengths, ids = lengths.repeat(self._replicas), ids.repeat(self._replicas)
            weights = None if weights is None else weights.repeat(self._replicas)
        bags = JaggedTensor(ids, weights, lengths, validate=False)
        return JaggedTensorAllToAll(bags, *_bags(ctx, self._features), self._pg)


class KeyedJaggedTensorPoolRwSharding(RwObjectPoolSharding):
    """A pool of bags cut by rows.

    Args:
        env: who takes part.
        device: where rows live.
        pool_size: ``R``.
        num_features: ``F``.

    Attributes:
        blocks: which rows are where.
        local_pool_size: rows that are here.

    Raises:
        UserError: several ranks without a process group.
    """

    replicated = False

    def __init__(
        self, env: ShardingEnv, device: torch.device, pool_size: int, num_features: int
    ) -> None:
        self._env, self._device, self._features = env, device, num_features
        super().__init__(RwBlocks(env, device, pool_size, replicated=self.replicated))

    def create_update_values_dist(self) -> RwKeyedJaggedTensorPoolUpdateValuesDist:
        """Sends what is written."""
        return RwKeyedJaggedTensorPoolUpdateValuesDist(
            self._features, self._env, self._device, self.blocks.num_replicas
        )

    def create_lookup_values_dist(self) -> RwKeyedJaggedTensorPoolLookupValuesDist:
        """Sends what was read back."""
        pg = self.blocks.lookup_pg
        env = self._env if pg is None else ShardingEnv.from_process_group(pg)
        return RwKeyedJaggedTensorPoolLookupValuesDist(self._features, env)


class KeyedJaggedTensorPoolRwReplicatedSharding(KeyedJaggedTensorPoolRwSharding):
    """A pool of bags that each node holds whole, cut by rows over its ranks."""

    replicated = True


class InferRwKeyedJaggedTensorPoolOutputDist(nn.Module):
    """Gathers bags of the devices of one process.

    Args:
        env: ``world_size`` devices.
        device: where the bags go.
    """

    def __init__(self, env: ShardingEnv, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device = env.world_size, device

    def forward(self, jagged_tensors: list[JaggedTensor]) -> JaggedTensor:
        """The bags of all devices, one after the other."""
        parts = [jagged_tensors[rank] for rank in range(self._ranks)]
        weights = [part.weights_or_none() for part in parts]
        weighted = [own.to(self._device) for own in weights if own is not None]
        return JaggedTensor(
            values=torch.cat([part.values().to(self._device) for part in parts]),
            weights=torch.cat(weighted) if weighted else None,
            lengths=torch.cat([part.lengths().to(self._device) for part in parts]),
        )


class InferRwKeyedJaggedTensorPoolSharding(InferObjectPoolSharding):
    """A pool of bags cut over the devices of one process; the arguments are those of the base."""

    def create_lookup_ids_dist(self) -> InferRwObjectPoolInputDist:
        """Sends ids to the devices that hold their rows."""
        bounds = torch.tensor(self.row_bounds)
        return InferRwObjectPoolInputDist(self._env, self._device, bounds[1:2], [bounds])

    def create_lookup_values_dist(self) -> InferRwKeyedJaggedTensorPoolOutputDist:
        """Gathers bags on one device."""
        return InferRwKeyedJaggedTensorPoolOutputDist(self._env, self._device)
