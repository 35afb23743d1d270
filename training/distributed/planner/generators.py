"""Plans written by hand: each strategy has a function that says where one table's shards go.

``construct_module_sharding_plan(ebc, {"t1": table_wise(rank=0), "t2": row_wise()}, ...)`` makes
the plan of one module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.nodes import get_local_size
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.sharding.by_hand import ParameterShardingGenerator
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.sharding.strategies.table_wise import table_wise

_DEFAULT_SHARDERS = {
    "EmbeddingBagCollectionSharder": "collections.pooled",
    "EmbeddingCollectionSharder": "collections.unpooled",
    "FeatureProcessedEmbeddingBagCollectionSharder": "collections.feature_processed",
    "FusedEmbeddingBagCollectionSharder": "collections.fused_sharded",
    "FusedEmbeddingCollectionSharder": "collections.fused_sharded",
    "ITEPEmbeddingBagCollectionSharder": "collections.itep",
    "ITEPEmbeddingCollectionSharder": "collections.itep",
    "ManagedCollisionEmbeddingBagCollectionSharder": "collections.mc_tables",
    "ManagedCollisionEmbeddingCollectionSharder": "collections.mc_tables",
    "QuantEmbeddingBagCollectionSharder": "inference.sharded",
    "QuantEmbeddingCollectionSharder": "inference.sharded",
}


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder per type of collection, each with its default optimizer."""
    # The sharded modules are imported when they are asked for: some of them need this module.
    return [
        getattr(importlib.import_module(f"tessera.training.distributed.{module}"), name)()
        for name, module in _DEFAULT_SHARDERS.items()
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """The default sharders by the type of module that they take."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def get_sharding_constructor_from_type(
    sharding_type: ShardingType | str,
) -> Callable[..., ParameterShardingGenerator]:
    """The function that places a table by a strategy, such as `row_wise`.

    Raises:
        UserError: an unknown name.
    """
    return strategy_of(sharding_type).by_hand


def sharder_for(module: nn.Module, sharder: ModuleSharder[Any] | None) -> ModuleSharder[Any]:
    """``sharder``, or where it is None the default one of the module's type.

    Raises:
        UserError: there is none, or it takes other modules.
    """
    by_type = get_module_to_default_sharders() if sharder is None else {}
    found = sharder or by_type.get(type(module))
    if found is None:
        raise UserError(
            f"module is {type(module).__name__}, which no default sharder takes; give a sharder, or "
            f"one of {sorted(known.__name__ for known in by_type)}"
        )
    if not isinstance(module, found.module_type):
        raise UserError(
            f"module is a {type(module).__name__}, not {type(found).__name__}'s; give its own sharder"
        )
    return found


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """The same placement for every table of ``module``.

    Raises:
        UserError: no sharder takes the module.
    """
    tables = sharder_for(module, sharder).shardable_parameters(module)
    return dict.fromkeys(tables, parameter_sharding_generator)


def construct_module_sharding_plan(  # noqa: PLR0917 - the signature TorchRec users know
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterSharding | ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one module.

    Args:
        module: what is to be sharded, on any device.
        per_param_sharding: by table name, its placement, or what `row_wise` and its relatives give,
            which makes it.
        sharder: None: the default one for the module's type.
        local_size: ranks per node; None: what the environment says.
        world_size: None: the default process group's.
        device_type: None: ``cuda`` where there is one, else ``cpu``.

    Raises:
        ValueError: ``per_param_sharding`` is of other tables than the module's, a placement lies
            outside the world, or no sharder takes the module.
    """
    sharder = sharder_for(module, sharder)
    tables = sharder.shardable_parameters(module)
    if set(tables) != set(per_param_sharding):
        raise ValueError(
            f"per_param_sharding places tables {sorted(per_param_sharding)}, the module has "
            f"{sorted(tables)}"
        )
    world_size = dist.get_world_size() if world_size is None else world_size
    local_size = get_local_size(world_size) if local_size is None else local_size
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return EmbeddingModuleShardingPlan(
        {
            name: where
            if isinstance(where := per_param_sharding[name], ParameterSharding)
            else where(param, local_size, world_size, device_type, sharder)
            for name, param in tables.items()
        }
    )


def balanced_table_wise_plan(
    modules: Mapping[str, tuple[nn.Module, ModuleSharder[Any]]],
    env: ShardingEnv,
    device_type: str,
) -> ShardingPlan:
    """Whole tables, largest first, each on the rank that holds the fewest numbers so far.

    Args:
        modules: by path, what is sharded and by whom.
        env: who takes part.
        device_type: where the ranks compute.
    """
    tables = [
        (path, name, param)
        for path, (module, sharder) in modules.items()
        for name, param in sharder.shardable_parameters(module).items()
    ]
    held = [0] * env.world_size
    rank_of: dict[tuple[str, str], int] = {}
    for path, name, param in sorted(tables, key=lambda table: -table[2].numel()):
        rank = held.index(min(held))
        rank_of[path, name] = rank
        held[rank] += param.numel()
    local_size = get_local_size(env.world_size)
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for path, (module, sharder) in modules.items():
        offered = sharder.compute_kernels(ShardingType.TABLE_WISE.value, device_type)
        kernel = next(name for name in ("fused", *offered) if name in offered)
        whole = {
            name: table_wise(rank, kernel) for (of, name), rank in rank_of.items() if of == path
        }
        plan[path] = construct_module_sharding_plan(
            module, whole, sharder, local_size, env.world_size, device_type
        )
    return ShardingPlan(plan)
