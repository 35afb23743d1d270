"""What pools that are cut by rows have in common, whatever a row is."""

from __future__ import annotations

from typing import Generic

from torch import Tensor, nn

from tessera.training.distributed.comm.awaitable import Awaitable
from tessera.training.distributed.plan.sharded_module import DistOut, Out
from tessera.training.distributed.pools.interfaces import ObjectPoolShardingContext
from tessera.training.distributed.pools.rw_sharding import RwObjectPoolSharding, keep_whole_states
from tessera.training.distributed.pools.sharded_pool import ShardedObjectPool
from tessera.training.modules import pool_rows


class RowWiseObjectPool(
    ShardedObjectPool[Out, DistOut, ObjectPoolShardingContext], Generic[Out, DistOut]
):
    """A pool of which each rank holds a block of rows.

    Its state dict names all rows.

    Args:
        sharding: how the pool is cut.
        rows: this rank's rows as buffers, by name.
    """

    def __init__(self, sharding: RwObjectPoolSharding, rows: dict[str, Tensor]) -> None:
        super().__init__()
        self._sharding = sharding
        for name, buffer in rows.items():
            self.register_buffer(name, buffer)
        self._lookup_ids = sharding.create_lookup_ids_dist()
        self._lookup_values = sharding.create_lookup_values_dist()
        self._update_ids = sharding.create_update_ids_dist()
        self._update_values = sharding.create_update_values_dist()
        keep_whole_states(self, sharding.blocks)

    @property
    def pool_size(self) -> int:
        """Rows of all ranks."""
        return self._sharding.blocks.pool_size

    def create_context(self) -> ObjectPoolShardingContext:
        """A new context of one lookup or update."""
        return self._sharding.create_context()

    def _update_ids_dist(
        self, ctx: ObjectPoolShardingContext, ids: Tensor
    ) -> Awaitable[Awaitable[Tensor]]:
        return self._send(self._update_ids, ctx, ids)

    def _lookup_ids_dist(
        self, ctx: ObjectPoolShardingContext, ids: Tensor
    ) -> Awaitable[Awaitable[Tensor]]:
        return self._send(self._lookup_ids, ctx, ids)

    def _send(
        self, ids_dist: nn.Module, ctx: ObjectPoolShardingContext, ids: Tensor
    ) -> Awaitable[Awaitable[Tensor]]:
        begun: Awaitable[Awaitable[Tensor]] = ids_dist(
            ctx, pool_rows.checked_ids(ids, self.pool_size)
        )
        return begun
