"""Pools of vectors cut by rows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.pools.ids import InferRwObjectPoolInputDist
from tessera.training.distributed.pools.interfaces import (
    InferObjectPoolSharding,
    TensorPoolRwShardingContext,
)
from tessera.training.distributed.pools.rw_sharding import RwBlocks, RwObjectPoolSharding
from tessera.training.distributed.travel.rows_all_to_all import TensorValuesAllToAll


class RwTensorPoolValuesDist(nn.Module):
    """Sends vectors: of an update the way that the ids went, of a lookup back.

    Args:
        pg: the ranks that take part; None: this one alone.
        is_update: see `RwObjectPoolIDsDist`.
        num_replicas: how often each row is there.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup | None,
        is_update: bool,  # noqa: FBT001 - the signature TorchRec users know
        num_replicas: int = 1,
    ) -> None:
        super().__init__()
        self._dist = TensorValuesAllToAll(pg)
        self._is_update, self._replicas = is_update, num_replicas

    def forward(self, ctx: TensorPoolRwShardingContext, values: Tensor) -> Awaitable[Tensor]:
        """Begin to send ``values``.

        Args:
            ctx: of the ids that were sent.
            values: ``[N, dim]``: of an update in the order of the ids as they were given, of a lookup in that of
                the ids as they came.

        Returns:
            Awaitable of the vectors in the order of the ids as they came, or as they were sent.
        """
        assert ctx.num_ids_each_rank_to_send is not None, "ids go before values"
        if self._is_update:
            assert ctx.bucketize_permute is not None, "as above"
            values = values.index_select(0, ctx.bucketize_permute)
            if self._replicas > 1:
                values = values.repeat(self._replicas, *[1] * (values.dim() - 1))
        begun: Awaitable[Tensor] = self._dist(
            values, ctx.num_ids_each_rank_to_send, ctx.num_ids_each_rank_to_receive
        )
        return begun


class TensorPoolRwSharding(RwObjectPoolSharding):
    """A pool of vectors cut by rows.

    Args:
        pool_size: ``R``.
        dim: columns.
        env: who takes part.
        device: where rows live.
        replicated: whether each node holds all rows.

    Attributes:
        blocks: which rows are where.
        local_pool_size: rows that are here.

    Raises:
        UserError: several ranks without a process group.
    """

    def __init__(
        self,
        pool_size: int,
        dim: int,
        env: ShardingEnv,
        device: torch.device,
        *,
        replicated: bool = False,
    ) -> None:
        del dim
        super().__init__(RwBlocks(env, device, pool_size, replicated=replicated))

    def create_update_values_dist(self) -> RwTensorPoolValuesDist:
        """Sends what is written."""
        blocks = self.blocks
        return RwTensorPoolValuesDist(
            blocks.update_pg, is_update=True, num_replicas=blocks.num_replicas
        )

    def create_lookup_values_dist(self) -> RwTensorPoolValuesDist:
        """Sends what was read back."""
        return RwTensorPoolValuesDist(self.blocks.lookup_pg, is_update=False)


class InferRwTensorPoolOutputDist(nn.Module):
    """Gathers vectors of the devices of one process.

    Args:
        env: ``world_size`` devices.
        device: where the vectors go.
    """

    def __init__(self, env: ShardingEnv, device: torch.device) -> None:
        super().__init__()
        self._ranks, self._device = env.world_size, device

    def forward(self, lookups: list[Tensor]) -> Tensor:
        """The rows of all devices ``[N_r, dim]``, one after the other ``[sum of N_r, dim]``."""
        moved = [lookups[rank].to(self._device) for rank in range(self._ranks)]
        return torch.cat(moved)


class InferRwTensorPoolSharding(InferObjectPoolSharding):
    """A pool of vectors cut over the devices of one process; the arguments are those of the base."""

    def create_lookup_ids_dist(self) -> InferRwObjectPoolInputDist:
        """Sends ids to the devices that hold their rows."""
        bounds = torch.tensor(self.row_bounds)
        return InferRwObjectPoolInputDist(self._env, self._device, bounds[1:2], [bounds])

    def create_lookup_values_dist(self) -> InferRwTensorPoolOutputDist:
        """Gathers rows on one device."""
        return InferRwTensorPoolOutputDist(self._env, self._device)
