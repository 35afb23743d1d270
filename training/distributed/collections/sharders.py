"""What sharders of trained and of quantized collections offer to a planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from tessera.errors import UserError
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ShardingType,
)
from tessera.training.distributed.plan.sharded_module import (
    M,
    ModuleSharder,
    StorageUsageType,
    compute_storage_usage,
)
from tessera.training.distributed.sharding.registry import strategies, strategy_of
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel
from tessera.training.optim.fused import FusedParams

S = TypeVar("S", bound=nn.Module)


class _SharderOfTables(ModuleSharder[M], Generic[M]):
    """What sharders of trained and of quantized collections have in common."""

    # The type of module that it takes; subclasses of the base classes name it.
    _plain: type[M]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)
        self._fused_params = None if fused_params is None else dict(fused_params)

    @property
    def module_type(self) -> type[M]:
        """Return the type of module that this sharder takes."""
        return self._plain

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """Return the settings that the sharder was made with."""
        return self._fused_params

    def storage_usage(
        self, tensor: Tensor, compute_device_type: str, compute_kernel: str
    ) -> dict[str, int]:
        """Bytes of a table (with its scales), by the memory that they lie in."""
        return compute_storage_usage(
            tensor, compute_device_type, compute_kernel, StorageUsageType.BASE
        )


class BaseEmbeddingSharder(_SharderOfTables[M], Generic[M]):
    """Shards a collection that is trained.

    Args:
        fused_params: the tables' optimizer: keys of `tessera.training.optim.fused.FusedParams`.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: an unknown key or value.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        FusedParams.from_dict(fused_params or {})
        super().__init__(fused_params, qcomm_codecs_registry)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The strategies that have a kernel on a kind of device."""
        names = [own.name for own in strategies()]
        return [name for name in names if self.compute_kernels(name, compute_device_type)]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernels that a planner may give to a strategy's tables on a kind of device.

        Ordinary parameters (``dense``) are offered for whole copies on every rank only, as in
        TorchRec, where ``compute_kernels=["dense"]`` asks for those.  A plan made by hand may have
        them with every strategy.
        """
        strategy = strategy_of(sharding_type)
        kernels = strategy.kernels(compute_device_type)
        dense = EmbeddingComputeKernel.DENSE.value
        return [kernel for kernel in kernels if strategy.replicated or kernel != dense]


class CollectionSharder(BaseEmbeddingSharder[M], Generic[M, S]):
    """Shards one type of module: a subclass names the type and its sharded form.

    Its arguments are those of `BaseEmbeddingSharder`.
    """

    _sharded: type[S]
    # Further arguments of the sharded form.
    _more: tuple[Any, ...] = ()

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the weights of the tables by table name."""
        # Their names end with <table>.weight.
        return {name.split(".")[-2]: table for name, table in module.named_parameters()}

    def shard(
        self,
        module: M,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> S:
        """The sharded form of ``module``, with its weights.

        Raises:
            ValueError: the module does what sharded tables do not, or the plan does not fit it.
        """
        registry = self.qcomm_codecs_registry
        return self._sharded(module, params, env, self.fused_params, device, registry, *self._more)

    def reshard(
        self,
        sharded_module: S,
        changed_shard_to_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> S:
        """``sharded_module``, its tables moved to where another plan puts them.

        Args:
            sharded_module: what `shard` gave.
            changed_shard_to_params: the new placements; tables that it leaves out stay.
            env: as of `shard`.
            device: the same.

        Raises:
            UserError: tables of this type of module are not moved, or see
                `tessera.training.distributed.collections.sharded_collection.ShardedCollection.update_shards`.
        """
        update = getattr(sharded_module, "update_shards", None)
        if update is None:
            raise UserError(
                f"tables of a {type(sharded_module).__name__} are not moved while it is trained; save a "
                "checkpoint and load it under the other plan"
            )
        if changed_shard_to_params:
            update(changed_shard_to_params, env, device)
        return sharded_module


class BaseQuantEmbeddingSharder(_SharderOfTables[M], Generic[M]):
    """Shards a quantized collection.

    Args:
        fused_params: settings of the lookups.
        shardable_params: names of the tables that may be sharded; None: all.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        shardable_params: list[str] | None = None,
    ) -> None:
        super().__init__(fused_params)
        self._shardable_params = shardable_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types of inference: whole tables, rows and columns."""
        del compute_device_type
        kinds = ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE
        return [kind.value for kind in kinds]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the quantized rows of the tables by table name."""
        tables = {
            name.split(".")[-2]: tensor
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if name.endswith(".weight")
        }
        return self._shardable(tables)

    def _shardable(self, tables: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(tensor, requires_grad=False)
            for name, tensor in tables.items()
            if self._shardable_params is None or name in self._shardable_params
        }

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the names of the kernels that a kind of device has."""
        del sharding_type
        kernels = [EmbeddingComputeKernel.QUANT.value]
        if compute_device_type == "cuda":
            kernels += [
                EmbeddingComputeKernel.QUANT_UVM.value,
                EmbeddingComputeKernel.QUANT_UVM_CACHING.value,
            ]
        return kernels
