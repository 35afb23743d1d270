"""Fused collections whose tables are spread over ranks, and the sharders that make them.

A fused collection is a plain one with an optimizer for its tables. Sharded it is the sharded plain
collection whose tables have that optimizer in the backward pass, so plans, kernels, state dicts and
re-sharding are those of `tessera.training.distributed.collections.sharded_collection`. Tables with the kernel ``dense``, which
those that a plan copies to every rank have, are ordinary parameters; each is updated as soon as its
gradient, of all ranks' samples, is there, by an optimizer of the class that the collection was given.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tessera.training.distributed.collections.fused import FusedEmbeddingBagCollection
from tessera.training.distributed.collections.fused_sequence import FusedEmbeddingCollection
from tessera.training.distributed.collections.pooled import ShardedEmbeddingBagCollection
from tessera.training.distributed.collections.sharders import BaseEmbeddingSharder
from tessera.training.distributed.collections.unpooled import ShardedEmbeddingCollection
from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from tessera.training.distributed.sharding.creation import tables_of
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel
from tessera.training.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tessera.training.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tessera.training.optim.combined_optimizer import CombinedOptimizer
from tessera.training.optim.keyed import KeyedOptimizerWrapper

_META = torch.device("meta")


class ShardedFusedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A `FusedEmbeddingBagCollection` whose tables live where a plan puts them.

    Args:
        module: each rank takes its shards from it, or first values where it is on the ``meta``
            device. Its optimizer goes along, with new state.
        table_name_to_parameter_sharding: the plan.
        env: who takes part.
        device: where this rank computes; None: the CPU.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: a plan that does not fit the tables or the ranks.
    """

    def __init__(
        self,
        module: FusedEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        plain = EmbeddingBagCollection(
            module.embedding_bag_configs(), is_weighted=module.is_weighted(), device=_META
        )
        _take_tables(plain.embedding_bags, module.embedding_bags)
        apply_optimizer_in_backward(
            module.optimizer_type(), plain.parameters(), dict(module.optimizer_kwargs())
        )
        super().__init__(
            plain, table_name_to_parameter_sharding, env, None, device, qcomm_codecs_registry
        )
        self._of_dense = _optimizers_of_dense(
            self.embedding_bags, "embedding_bags", table_name_to_parameter_sharding, module
        )

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that works in the backward pass, of all tables here."""
        sharded = super().fused_optimizer
        return CombinedOptimizer([sharded, *self._of_dense]) if self._of_dense else sharded

    @property
    def unsharded_module_type(self) -> type[FusedEmbeddingBagCollection]:  # type: ignore[override] # it is not a subclass of the plain collection
        """Return the type of module that this is the sharded form of."""
        return FusedEmbeddingBagCollection


class ShardedFusedEmbeddingCollection(ShardedEmbeddingCollection):
    """A `FusedEmbeddingCollection` whose tables live where a plan puts them.

    Its arguments are those of `ShardedFusedEmbeddingBagCollection`.

    Raises:
        ValueError: a plan that does not fit the tables or the ranks.
    """

    def __init__(
        self,
        module: FusedEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        plain = EmbeddingCollection(
            module.embedding_configs(), device=_META, need_indices=module.need_indices()
        )
        _take_tables(plain.embeddings, module.embeddings)
        apply_optimizer_in_backward(
            module.optimizer_type(), plain.parameters(), dict(module.optimizer_kwargs())
        )
        super().__init__(
            plain, table_name_to_parameter_sharding, env, None, device, qcomm_codecs_registry
        )
        self._of_dense = _optimizers_of_dense(
            self.embeddings, "embeddings", table_name_to_parameter_sharding, module
        )

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizer that works in the backward pass, of all tables here."""
        sharded = super().fused_optimizer
        return CombinedOptimizer([sharded, *self._of_dense]) if self._of_dense else sharded

    @property
    def unsharded_module_type(self) -> type[FusedEmbeddingCollection]:  # type: ignore[override] # it is not a subclass of the plain collection
        """Return the type of module that this is the sharded form of."""
        return FusedEmbeddingCollection


def _take_tables(plain: nn.ModuleDict, fused: nn.ModuleDict) -> None:
    """Let the tables of a plain collection be those of a fused one, in the same memory."""
    held = tables_of(fused)
    for name, table in plain.items():
        table.weight = nn.Parameter(held[name].detach())


def _optimizers_of_dense(
    tables: nn.ModuleDict,
    holder: str,
    plan: Mapping[str, ParameterSharding],
    module: FusedEmbeddingBagCollection | FusedEmbeddingCollection,
) -> list[KeyedOptimizerWrapper]:
    """One optimizer for each ordinary parameter of the tables here; it steps when the gradient is there."""
    optimizers = []
    for name, weight in tables.named_parameters():
        if plan[name.split(".")[0]].compute_kernel != EmbeddingComputeKernel.DENSE.value:
            continue
        optimizer = KeyedOptimizerWrapper(
            {f"{holder}.{name}": weight},
            lambda weights: module.optimizer_type()(weights, **module.optimizer_kwargs()),
        )
        optimizers.append(optimizer)

        def step(parameter: Tensor, optimizer: KeyedOptimizerWrapper = optimizer) -> None:
            optimizer.step()
            parameter.grad = None

        weight.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return optimizers


class FusedEmbeddingBagCollectionSharder(BaseEmbeddingSharder[FusedEmbeddingBagCollection]):
    """Turns `FusedEmbeddingBagCollection` into its sharded form.

    Args:
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """

    _plain = FusedEmbeddingBagCollection

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    def shardable_parameters(self, module: FusedEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Return the weights of the tables by table name."""
        return tables_of(module.embedding_bags)

    def shard(
        self,
        module: FusedEmbeddingBagCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedFusedEmbeddingBagCollection:
        """The sharded form of ``module``, with its weights and its optimizer.

        Raises:
            ValueError: the plan does not fit it.
        """
        return ShardedFusedEmbeddingBagCollection(
            module, params, env, device, self.qcomm_codecs_registry
        )


class FusedEmbeddingCollectionSharder(BaseEmbeddingSharder[FusedEmbeddingCollection]):
    """Turns `FusedEmbeddingCollection` into its sharded form.

    Args:
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.
    """

    _plain = FusedEmbeddingCollection

    def __init__(self, qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None) -> None:
        super().__init__(None, qcomm_codecs_registry)

    def shardable_parameters(self, module: FusedEmbeddingCollection) -> dict[str, nn.Parameter]:
        """Return the weights of the tables by table name."""
        return tables_of(module.embeddings)

    def shard(
        self,
        module: FusedEmbeddingCollection,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> ShardedFusedEmbeddingCollection:
        """The sharded form of ``module``, with its weights and its optimizer.

        Raises:
            ValueError: the plan does not fit it.
        """
        return ShardedFusedEmbeddingCollection(
            module, params, env, device, self.qcomm_codecs_registry
        )
