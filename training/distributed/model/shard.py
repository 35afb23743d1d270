"""Sharding: one collection, or every collection in a model.

`tessera.training.distributed.model_parallel.DistributedModelParallel` uses the same functions and
wraps the rest for training; without it they are for inference, and for those who wrap by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tessera.errors import UserError
from tessera.training.distributed.comm.environment import ShardingEnv, default_env
from tessera.training.distributed.comm.nodes import get_local_size
from tessera.training.distributed.plan.first_values import init_parameters
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tessera.training.distributed.plan.sharded_module import ModuleSharder, outermost
from tessera.training.distributed.planner.generators import (
    balanced_table_wise_plan,
    construct_module_sharding_plan,
    get_default_sharders,
    sharder_for,
)
from tessera.training.distributed.sharding.by_hand import ParameterShardingGenerator

Plan = (
    EmbeddingModuleShardingPlan
    | Mapping[str, ParameterSharding | ParameterShardingGenerator]
    | ParameterShardingGenerator
)
"""A plan of one module; or one generator per table; or one for all tables."""


def _device(device: torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def shard(
    module: nn.Module,
    plan: Plan,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: ModuleSharder[Any] | None = None,
) -> nn.Module:
    """Return the sharded form of one collection.

    Args:
        module: the collection.
        plan: where its tables go: placements by table name, or what makes them
            (`tessera.training.distributed.sharding_plan.table_wise` and its relatives), for each
            table or one for all.
        env: who takes part; None: the default process group, or this process alone.
        device: where this rank computes; None: ``cuda`` where there is one, else ``cpu``.
        sharder: None: the default one for the module's type.

    Raises:
        UserError: nothing shards modules of this type.
    """
    env, device = env or default_env(), _device(device)
    sharder = sharder_for(module, sharder)
    if callable(plan):
        plan = dict.fromkeys(sharder.shardable_parameters(module), plan)
    local_size = get_local_size(env.world_size)
    placements = construct_module_sharding_plan(
        module, plan, sharder, local_size, env.world_size, device.type
    )
    return sharder.shard(module, placements, env, device)


def shard_modules(  # noqa: PLR0917 - the signature TorchRec users know
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: ShardingPlan | None = None,
    sharders: list[ModuleSharder[Any]] | None = None,
    init_params: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> nn.Module:
    """Replace every collection in a model by its sharded form.

    Args:
        module: the model; it is changed, and returned unless it is a collection itself.
        env: who takes part; None: the default process group, or this process alone.
        device: where this rank computes; None: ``cuda`` where there is one, else ``cpu``.
        plan: where the tables go; None: what `EmbeddingShardingPlanner` says, with one rank all
            here.
        sharders: one per type of module; None: the default ones.
        init_params: whether parts on the ``meta`` device get memory and first values.

    Raises:
        UserError: the plan names a module that is not there or that no sharder takes, or several
            ranks have no process group.
        PlannerError: there is no plan.
    """
    env, device = env or default_env(), _device(device)
    sharders = sharders or get_default_sharders()
    plan = plan or made_plan(module, env, device, sharders)
    module = shard_parts(module, plan, env, device, sharders)
    if init_params:
        init_parameters(module, device)
    return module


_shard_modules = shard_modules
"""The name under which the tutorial imports it."""


def shard_parts(
    module: nn.Module,
    plan: ShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    sharders: Sequence[ModuleSharder[Any]],
    *,
    env_of_type: Mapping[type[nn.Module], ShardingEnv] | None = None,
) -> nn.Module:
    """Replace the modules that ``plan`` names, and no others, by their sharded form.

    Args:
        module: the model.
        plan: where tables go.
        env: who takes part.
        device: where this rank computes.
        sharders: one per type of module.
        env_of_type: who takes part in modules of these types; others have ``env``.

    Returns:
        ``module``, or its sharded form where it is a collection itself.

    Raises:
        UserError: the plan names a module that is not there or that no sharder takes.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    paths = {path for path, part in module.named_modules() if type(part) in by_type}
    if unknown := sorted(set(plan.plan) - paths):
        raise UserError(
            f"the plan names module {unknown[0]!r}; the model's shardable modules are "
            f"{sorted(paths)}"
        )
    for path, placements in plan.plan.items():
        part = module.get_submodule(path)
        own = (env_of_type or {}).get(type(part), env)
        sharded = by_type[type(part)].shard(part, placements, own, device)
        if not path:
            return sharded
        module.set_submodule(path, sharded)
    return module


def made_plan(
    module: nn.Module,
    env: ShardingEnv,
    device: torch.device,
    sharders: Sequence[ModuleSharder[Any]],
) -> ShardingPlan:
    """The plan where nobody gives one: `EmbeddingShardingPlanner`'s; of one rank, all tables whole.

    Raises:
        PlannerError: there is no plan.
    """
    world_size = env.world_size
    if world_size == 1:
        by_type = {sharder.module_type: sharder for sharder in sharders}
        found = outermost(module, lambda part: by_type.get(type(part)))
        parts = {path: (part, sharder) for path, part, sharder in found}
        return balanced_table_wise_plan(parts, env, device.type)
    # The planner takes a while to import, and a given plan does not need it.
    from tessera.training.distributed.planner.hardware import Topology  # noqa: PLC0415
    from tessera.training.distributed.planner.planners import EmbeddingShardingPlanner  # noqa: PLC0415

    # One process that serves several devices is one node.
    local = world_size if env.process_group is None else env.ranks_per_node
    planner = EmbeddingShardingPlanner(
        Topology(world_size=world_size, compute_device=device.type, local_world_size=local)
    )
    if env.process_group is None:
        return planner.plan(module, list(sharders))
    return planner.collective_plan(module, list(sharders), env.process_group)
