"""What a finished plan must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from tessera.training.distributed.plan.plan_types import ShardingPlan
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.planner.enumerators import shardable_modules
from tessera.training.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)


def validate_modules_inclusion_in_sharding_plan(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    constraints: Mapping[str, ParameterConstraints] | None = None,
    device_group: str | None = None,
) -> None:
    """Check that a plan has all modules of a model that sharders take and find tables in.

    Args:
        sharding_plan: the plan.
        module: the model.
        sharders: one per type of module.
        constraints: by table name; needed with ``device_group``.
        device_group: only modules with a table that is constrained to this kind of device count; None:
            all do.

    Raises:
        PlannerError: a module is not in the plan, or ``device_group`` is given without constraints.
    """
    if device_group is not None and constraints is None:
        raise PlannerError("device_group is given without constraints, which say what is in it")

    def counts(tables: Mapping[str, Any]) -> bool:
        if device_group is None or constraints is None:
            return bool(tables)
        return any(
            name in constraints and constraints[name].device_group == device_group
            for name in tables
        )

    missing = sorted(
        path
        for path, child, sharder in shardable_modules(module, sharders)
        if counts(sharder.shardable_parameters(child)) and path not in sharding_plan.plan
    )
    if missing:
        raise PlannerError(
            f"{', '.join(missing)}: not present in the sharding plan, though a sharder takes it; plan it "
            "or leave its sharder out",
            PlannerErrorType.MISSING_MODULE_IN_PLAN,
        )
