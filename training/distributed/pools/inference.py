"""Pools over the devices of one process, which models that are traced and scripted may hold.

Legend: ``N`` ids, ``W`` devices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    ObjectPoolShardingPlan,
    ObjectPoolShardingType,
)
from tessera.training.distributed.pools.ids import shard_devices
from tessera.training.distributed.pools.kjt_sharding import InferRwKeyedJaggedTensorPoolSharding
from tessera.training.distributed.pools.tensor_sharding import InferRwTensorPoolSharding
from tessera.training.modules import pool_rows
from tessera.training.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from tessera.training.modules.object_pool import ObjectPool
from tessera.training.modules.tensor_pool import TensorPool, check_vectors
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


def _check_plan(plan: ObjectPoolShardingPlan) -> None:
    if not plan.inference or plan.sharding_type is not ObjectPoolShardingType.ROW_WISE:
        raise ValueError(
            f"the plan is {plan.sharding_type.value}, inference={plan.inference}; the devices of one process "
            "share a pool row_wise with inference=True"
        )


class LocalShardPool(nn.Module):
    """The rows of a pool of vectors that are on one device.

    Args:
        shard: ``[rows, dim]``.
    """

    def __init__(self, shard: Tensor) -> None:
        super().__init__()
        self._shard = nn.Parameter(shard, requires_grad=False)

    def forward(self, rank_ids: Tensor) -> Tensor:
        """The rows of ``rank_ids`` ``[N]``, counted from the first one here, ``[N, dim]``."""
        return self._shard[rank_ids.to(self._shard.device)]

    @torch.no_grad()
    def update(self, rank_ids: Tensor, values: Tensor) -> None:
        """Write ``values`` ``[N, dim]`` to rows; of an id that is there twice the last one counts."""
        ids = rank_ids.to(self._shard.device, torch.int64)
        pool_rows.write_vectors(self._shard, ids, values.to(self._shard.device))


class ShardedInferenceTensorPool(ObjectPool[Tensor]):
    """A `TensorPool` whose rows are divided over the devices of one process.

    Args:
        env: ``world_size`` devices; no process group is needed.
        pool_size: ``R``.
        dim: columns.
        dtype: of the rows.
        plan: row-wise, for inference; its ``memory_capacity_per_rank`` says how many rows each device gets.
        module: the rows to begin with, unless it is on the ``meta`` device.
        device: where ids come from and rows go to; None: the CPU.  Shards are on the CPU if it is, otherwise on
            the first ``W`` accelerators of its type.

    Raises:
        ValueError: another plan, or capacities that are not one for each device.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        plan: ObjectPoolShardingPlan,
        module: TensorPool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _check_plan(plan)
        self._pool_size, self._device = pool_size, device or torch.device("cpu")
        sharding = InferRwTensorPoolSharding(
            pool_size, env, self._device, plan.memory_capacity_per_rank
        )
        rows = sharding.local_pool_size_per_rank
        whole = module.pool if not module.pool.is_meta else torch.zeros(pool_size, dim, dtype=dtype)
        self._local_shard_pools = nn.ModuleList(
            LocalShardPool(part.to(place, copy=True))
            for part, place in zip(
                whole.split_with_sizes(rows),
                shard_devices(self._device, env.world_size),
                strict=True,
            )
        )
        self._ids = sharding.create_lookup_ids_dist()
        self._values = sharding.create_lookup_values_dist()

    @property
    def pool_size(self) -> int:
        """Rows of all devices."""
        return self._pool_size

    @property
    def dim(self) -> int:
        """How many columns there are."""
        return self._shards()[0].size(1)

    @property
    def dtype(self) -> torch.dtype:
        """The rows' dtype."""
        return self._shards()[0].dtype

    @property
    def device(self) -> torch.device:
        """Where ids come from and rows go to."""
        return self._device

    def _shards(self) -> list[Tensor]:
        return list(self._local_shard_pools.parameters())

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of ``ids`` ``[N]``, ``[N, dim]``.

        Raises:
            IndexError: an id is not a row.
            ValueError: ids are not integers ``[N]``.
        """
        ids = pool_rows.checked_ids(ids, self._pool_size)
        parts, places, _blocks, _counts = self._ids(ids)
        found = [pool(parts[rank]) for rank, pool in enumerate(self._local_shard_pools)]
        rows: Tensor = self._values(found)[places]
        return rows

    def lookup(self, ids: Tensor) -> Tensor:
        """See `forward`."""
        rows: Tensor = self(ids)
        return rows

    @torch.no_grad()
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Write ``values`` ``[N, dim]`` to the rows of ``ids`` ``[N]``; the last one of an id counts.

        Raises:
            IndexError: an id is not a row.
            ValueError: values of another shape or dtype.
        """
        ids = pool_rows.checked_ids(ids, self._pool_size)
        check_vectors(values, ids, self._shards()[0])
        own_ids, own_values, _places = self._ids.update(ids, values)
        for rank, pool in enumerate(self._local_shard_pools):
            assert isinstance(pool, LocalShardPool)
            pool.update(own_ids[rank], own_values[rank])


class ShardedInferenceKeyedJaggedTensorPool(ObjectPool[KeyedJaggedTensor]):
    """A `KeyedJaggedTensorPool` whose rows are divided over the devices of one process; they are read alone.

    Args:
        pool_size: ``R``.
        feature_max_lengths: the longest bag of each feature; their order is that of the results' keys.
        values_dtype: of the ids.
        is_weighted: whether ids carry weights.
        sharding_env: ``world_size`` devices; no process group is needed.
        sharding_plan: row-wise, for inference; its ``memory_capacity_per_rank`` says how many rows each device
            gets.
        module: the rows, unless it is on the ``meta`` device.
        device: as of `ShardedInferenceTensorPool`.

    Raises:
        ValueError: another plan, or capacities that are not one for each device.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,  # noqa: FBT001 - as above
        sharding_env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        module: KeyedJaggedTensorPool,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _check_plan(sharding_plan)
        self._pool_size, self._device = pool_size, device or torch.device("cpu")
        self._keys, self._dtype = list(feature_max_lengths), values_dtype
        sharding = InferRwKeyedJaggedTensorPoolSharding(
            pool_size, sharding_env, self._device, sharding_plan.memory_capacity_per_rank
        )
        rows = sharding.local_pool_size_per_rank
        places = shard_devices(self._device, sharding_env.world_size)
        self._local_kjt_pool_shards = nn.ModuleList(
            KeyedJaggedTensorPool(size, feature_max_lengths, values_dtype, is_weighted, place)
            for size, place in zip(rows, places, strict=True)
        )
        for name, whole in module.named_buffers():
            if not whole.is_meta:
                for pool, part in zip(
                    self._local_kjt_pool_shards, whole.split_with_sizes(rows), strict=True
                ):
                    pool.get_buffer(name).copy_(part)
        self._is_weighted = is_weighted
        self._ids = sharding.create_lookup_ids_dist()
        self._values = sharding.create_lookup_values_dist()

    @property
    def pool_size(self) -> int:
        """Rows of all devices."""
        return self._pool_size

    @property
    def dtype(self) -> torch.dtype:
        """The ids' dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where ids come from and bags go to."""
        return self._device

    def forward(self, ids: Tensor) -> KeyedJaggedTensor:
        """The bags of the rows of ``ids`` ``[N]``: ``N`` bags of each feature.

        Raises:
            IndexError: an id is not a row.
            ValueError: ids are not integers ``[N]``.
        """
        ids = pool_rows.checked_ids(ids, self._pool_size)
        parts, places, _blocks, _counts = self._ids(ids)
        found = []
        for rank, pool in enumerate(self._local_kjt_pool_shards):
            assert isinstance(pool, KeyedJaggedTensorPool)
            weights = pool.weights if self._is_weighted else None
            bags = pool_rows.read_bags(parts[rank], pool.key_lengths, pool.values, weights)
            own_weights = pool_rows.weights_of(bags) if self._is_weighted else None
            found.append(JaggedTensor(bags[1], own_weights, bags[0], validate=False))
        bags = self._values(found)
        return pool_rows.keyed_bags(
            self._keys, places, bags.lengths(), bags.values(), bags.weights_or_none()
        )

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """See `forward`."""
        bags: KeyedJaggedTensor = self(ids)
        return bags

    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Refuse to write: make the pool before it is sharded for inference.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "a pool of bags for inference is read alone; update the plain pool and shard it again"
        )
