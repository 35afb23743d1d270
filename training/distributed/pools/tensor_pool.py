"""Pools of vectors over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.training.distributed.comm.awaitable import Awaitable, LazyAwaitable
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
)
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.pools.ids import RwObjectPoolIDsDist
from tessera.training.distributed.pools.inference import ShardedInferenceTensorPool
from tessera.training.distributed.pools.interfaces import ObjectPoolShardingContext
from tessera.training.distributed.pools.row_wise_pool import RowWiseObjectPool
from tessera.training.distributed.pools.tensor_sharding import TensorPoolRwSharding
from tessera.training.distributed.travel.rows_all_to_all import TensorAllToAllSplitsAwaitable
from tessera.training.modules import pool_rows
from tessera.training.modules.tensor_pool import TensorPool, check_vectors


class TensorPoolAwaitable(LazyAwaitable[Tensor]):
    """Vectors that are being sent back.

    Args:
        awaitable: of ``[N, dim]``, in the order in which their ids were sent.
        unbucketize_permute: ``[N]`` int64, the place there of each id as it was given.
    """

    def __init__(self, awaitable: Awaitable[Tensor], unbucketize_permute: Tensor) -> None:
        super().__init__()
        self._awaitable, self._places = awaitable, unbucketize_permute

    def _wait_impl(self) -> Tensor:
        return self._awaitable.wait().index_select(0, self._places)


class ShardedTensorPool(RowWiseObjectPool[Tensor, Tensor]):
    """A `TensorPool` of which each rank holds a block of rows; see `tessera.training.distributed.pools`.

    Its state dict has all rows as ``_pool``, a ``ShardedTensor`` where there is a process group.

    Args:
        env: who takes part.
        pool_size: rows of all ranks.
        dim: columns.
        dtype: of the rows.
        sharding_plan: how the pool is cut.
        device: where this rank's rows live; None: the CPU.

    Raises:
        UserError: several ranks without a process group.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        replicated = sharding_plan.sharding_type is ObjectPoolShardingType.REPLICATED_ROW_WISE
        sharding = TensorPoolRwSharding(pool_size, dim, env, device, replicated=replicated)
        self._pool: Tensor
        rows = torch.zeros(sharding.local_pool_size, dim, dtype=dtype, device=device)
        super().__init__(sharding, {"_pool": rows})

    @property
    def dim(self) -> int:
        """How many columns there are."""
        return self._pool.size(1)

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's rows live."""
        return self._pool.device

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Write ``values`` ``[N, dim]`` to the rows of ``ids`` ``[N]``; every rank takes part.

        Raises:
            IndexError: an id is not a row.
            ValueError: values of another shape or dtype, or ids that are not integers ``[N]``.
        """
        if ids.dim() == 1:  # they are looked at where they are sent
            check_vectors(values, ids, self._pool)
        pg = self._sharding.blocks.update_pg
        if pg is None or pg.size() == 1:
            super().update(ids, values)
        else:
            self._update_in_one_exchange(pg, ids, values)

    @torch.no_grad()
    def _update_in_one_exchange(self, pg: dist.ProcessGroup, ids: Tensor, values: Tensor) -> None:
        """Send each id and its vector as the bytes of one row."""
        ids = pool_rows.checked_ids(ids, self.pool_size)
        ctx, ids_dist = self._sharding.blocks.context(), self._update_ids
        assert isinstance(ids_dist, RwObjectPoolIDsDist), "of pools cut by rows"
        sent, counts = ids_dist.by_rank(ctx, ids)
        assert ctx.bucketize_permute is not None, "the ids have an order"
        order = ctx.bucketize_permute.repeat(self._sharding.blocks.num_replicas)
        parts = [sent.unsqueeze(1), values.index_select(0, order)]
        rows = torch.cat([part.view(torch.uint8) for part in parts], 1)
        came = TensorAllToAllSplitsAwaitable(pg, rows, counts, rows.device).wait().wait()
        width = ids.element_size()
        own_ids, own_values = came.split_with_sizes([width, rows.size(1) - width], 1)
        self._update_local(ctx, _as(own_ids, ids.dtype).squeeze(1), _as(own_values, values.dtype))

    def _update_preproc(self, values: Tensor) -> Tensor:
        return values

    def _update_values_dist(
        self, ctx: ObjectPoolShardingContext, values: Tensor
    ) -> Awaitable[Tensor]:
        begun: Awaitable[Tensor] = self._update_values(ctx, values)
        return begun

    def _update_local(self, ctx: ObjectPoolShardingContext, ids: Tensor, values: Tensor) -> None:
        del ctx
        pool_rows.write_vectors(self._pool, ids, values)

    def _lookup_local(self, ctx: ObjectPoolShardingContext, ids: Tensor) -> Tensor:
        del ctx
        return self._pool.index_select(0, ids)

    def _lookup_values_dist(
        self, ctx: ObjectPoolShardingContext, values: Tensor
    ) -> LazyAwaitable[Tensor]:
        assert ctx.unbucketize_permute is not None, "ids go before values"
        return TensorPoolAwaitable(self._lookup_values(ctx, values), ctx.unbucketize_permute)


def _as(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of bytes ``[N, bytes]`` as numbers ``[N, dim]``."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


class TensorPoolSharder(ModuleSharder[TensorPool]):
    """Turns a `TensorPool` into its form over ranks, or over the devices of one process for inference.

    Unless the pool is on the ``meta`` device its rows go along; every rank is given the same ones.
    """

    def __init__(self) -> None:
        super().__init__()

    def shard(  # type: ignore[override] # a pool's plan is another than that of tables
        self,
        module: TensorPool,
        plan: ObjectPoolShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedTensorPool | ShardedInferenceTensorPool:
        """The sharded form of ``module``.

        Args:
            module: the pool.
            plan: how it is cut.
            env: who takes part.
            device: where this rank's rows live, and where ids come from; None: the CPU.
        """
        if plan.inference:
            return ShardedInferenceTensorPool(
                env, module.pool_size, module.dim, module.dtype, plan, module, device
            )
        pool = ShardedTensorPool(env, module.pool_size, module.dim, module.dtype, plan, device)
        if not module.pool.is_meta:
            pool.load_state_dict(module.state_dict())
        return pool

    @property
    def module_type(self) -> type[TensorPool]:
        """Return the type of module that this sharder takes."""
        return TensorPool
