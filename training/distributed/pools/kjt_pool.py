"""Pools of bags over ranks.

Legend: ``N`` rows that are read or written, ``F`` features.
"""

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
from tessera.training.distributed.pools.inference import ShardedInferenceKeyedJaggedTensorPool
from tessera.training.distributed.pools.interfaces import ObjectPoolShardingContext
from tessera.training.distributed.pools.kjt_sharding import (
    KeyedJaggedTensorPoolRwReplicatedSharding,
    KeyedJaggedTensorPoolRwSharding,
)
from tessera.training.distributed.pools.row_wise_pool import RowWiseObjectPool
from tessera.training.distributed.travel.rows_all_to_all import exchange_with_bags
from tessera.training.modules import pool_rows
from tessera.training.modules.keyed_jagged_tensor_pool import (
    KeyedJaggedTensorPool,
    own_features,
)
from tessera.training.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

_SHARDINGS = {
    ObjectPoolShardingType.ROW_WISE: KeyedJaggedTensorPoolRwSharding,
    ObjectPoolShardingType.REPLICATED_ROW_WISE: KeyedJaggedTensorPoolRwReplicatedSharding,
}


class KeyedJaggedTensorPoolAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """Bags that are being sent back.

    Args:
        awaitable: of ``N * F`` bags by row, in the order in which the ids were sent.
        keys: the features.
        device: where the bags arrive.
        unbucketize_permute: ``[N]`` int64, the place there of each id as it was given.
    """

    def __init__(
        self,
        awaitable: Awaitable[JaggedTensor],
        keys: list[str],
        device: torch.device,
        unbucketize_permute: Tensor,
    ) -> None:
        super().__init__()
        del device
        self._awaitable, self._keys, self._places = awaitable, keys, unbucketize_permute

    def _wait_impl(self) -> KeyedJaggedTensor:
        bags = self._awaitable.wait()
        return pool_rows.keyed_bags(
            self._keys, self._places, bags.lengths(), bags.values(), bags.weights_or_none()
        )


class ShardedKeyedJaggedTensorPool(RowWiseObjectPool[KeyedJaggedTensor, JaggedTensor]):
    """A `KeyedJaggedTensorPool` of which each rank holds a block of rows; see `tessera.training.distributed.pools`.

    Its state dict has the entries of the plain pool for all rows, as ``ShardedTensor`` where there is a process
    group.

    Args:
        pool_size: rows of all ranks.
        feature_max_lengths: the longest bag of each feature; their order is that of the results' keys.
        values_dtype: of the ids.
        is_weighted: whether ids carry weights.
        sharding_env: who takes part.
        sharding_plan: how the pool is cut.
        device: where this rank's rows live; None: the CPU.

    Raises:
        UserError: several ranks without a process group.
    """

    def __init__(  # noqa: PLR0917 - the signature TorchRec users know
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,  # noqa: FBT001 - as above
        sharding_env: ShardingEnv,
        sharding_plan: ObjectPoolShardingPlan,
        device: torch.device | None = None,
    ) -> None:
        device = device or torch.device("cpu")
        sharding = _SHARDINGS[sharding_plan.sharding_type](
            sharding_env, device, pool_size, len(feature_max_lengths)
        )
        # The buffers of a plain pool of this rank's rows.
        plain = KeyedJaggedTensorPool(
            sharding.local_pool_size, feature_max_lengths, values_dtype, is_weighted, device
        )
        self.values: Tensor
        self.key_lengths: Tensor
        self.weights: Tensor
        super().__init__(sharding, dict(plain.named_buffers()))
        self._feature_max_lengths, self._is_weighted = dict(feature_max_lengths), is_weighted

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """The longest bag of each feature."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """The ids' dtype."""
        return self.values.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where this rank's rows live."""
        return self.values.device

    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Write bags to the rows of ``ids`` ``[N]``; every rank takes part.

        Args:
            ids: the rows.
            values: ``N`` bags of each feature of the pool, in any order; other features are ignored.

        Raises:
            IndexError: an id is not a row.
            KeyError: a feature is missing.
            ValueError: another number of bags, a bag that is too long, values of another dtype, no weights, or
                ids that are not integers ``[N]``.
        """
        pool_rows.check_form(ids)
        if values.stride() != len(ids):
            raise ValueError(
                f"there are {len(ids)} ids and {values.stride()} bags; give one of each"
            )
        pg = self._sharding.blocks.update_pg
        if pg is None or pg.size() == 1:
            super().update(ids, values)  # compares ids with the rows
        else:
            self._update_in_one_exchange(pg, ids, values)

    @torch.no_grad()
    def _update_in_one_exchange(
        self, pg: dist.ProcessGroup, ids: Tensor, values: KeyedJaggedTensor
    ) -> None:
        """Send each id with its bags."""
        ids = pool_rows.checked_ids(ids, self.pool_size)
        blocks, ids_dist = self._sharding.blocks, self._update_ids
        ctx = blocks.context()
        assert isinstance(ids_dist, RwObjectPoolIDsDist), "of pools cut by rows"
        sent, counts = ids_dist.by_rank(ctx, ids)
        assert ctx.bucketize_permute is not None, "the ids have an order"
        lengths, entries, weights = pool_rows.bags_by_row(
            self._update_preproc(values), ctx.bucketize_permute
        )
        copies = blocks.num_replicas
        bags = JaggedTensor(
            entries.repeat(copies),
            None if weights is None else weights.repeat(copies),
            lengths.long().view(-1, len(self._feature_max_lengths)).repeat(copies, 1),
            validate=False,
        )
        self._update_local(ctx, *exchange_with_bags(pg, sent, counts, bags))

    def _update_preproc(self, values: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return own_features(
            values, self._feature_max_lengths, self.values.dtype, weighted=self._is_weighted
        )

    def _update_values_dist(
        self, ctx: ObjectPoolShardingContext, values: KeyedJaggedTensor
    ) -> Awaitable[JaggedTensor]:
        begun: Awaitable[JaggedTensor] = self._update_values(values, ctx)
        return begun

    def _update_local(
        self, ctx: ObjectPoolShardingContext, ids: Tensor, values: JaggedTensor
    ) -> None:
        del ctx
        bags = values.lengths(), values.values(), values.weights_or_none()
        weights = self.weights if self._is_weighted else None
        pool_rows.write_bags(ids, bags, self.key_lengths, self.values, weights)

    def _lookup_local(self, ctx: ObjectPoolShardingContext, ids: Tensor) -> JaggedTensor:
        del ctx
        weights = self.weights if self._is_weighted else None
        found = pool_rows.read_bags(ids, self.key_lengths, self.values, weights)
        return JaggedTensor(found[1], found[2], found[0], validate=False)

    def _lookup_values_dist(
        self, ctx: ObjectPoolShardingContext, values: JaggedTensor
    ) -> LazyAwaitable[KeyedJaggedTensor]:
        assert ctx.unbucketize_permute is not None, "ids go before values"
        return KeyedJaggedTensorPoolAwaitable(
            self._lookup_values(ctx, values),
            list(self._feature_max_lengths),
            self.device,
            ctx.unbucketize_permute,
        )


class KeyedJaggedTensorPoolSharder(ModuleSharder[KeyedJaggedTensorPool]):
    """Turns a `KeyedJaggedTensorPool` into its form over ranks, or over the devices of one process for inference.

    Unless the pool is on the ``meta`` device its rows go along; every rank is given the same ones.
    """

    def __init__(self) -> None:
        super().__init__()

    def shard(  # type: ignore[override] # a pool's plan is another than that of tables
        self,
        module: KeyedJaggedTensorPool,
        plan: ObjectPoolShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedKeyedJaggedTensorPool | ShardedInferenceKeyedJaggedTensorPool:
        """The sharded form of ``module``.

        Args:
            module: the pool.
            plan: how it is cut.
            env: who takes part.
            device: where this rank's rows live, and where ids come from; None: the CPU.
        """
        own = module.pool_size, module.feature_max_lengths, module.values_dtype, module.is_weighted
        if plan.inference:
            return ShardedInferenceKeyedJaggedTensorPool(*own, env, plan, module, device)
        pool = ShardedKeyedJaggedTensorPool(*own, env, plan, device)
        if not module.values.is_meta:
            pool.load_state_dict(module.state_dict())
        return pool

    @property
    def module_type(self) -> type[KeyedJaggedTensorPool]:
        """Return the type of module that this sharder takes."""
        return KeyedJaggedTensorPool
