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
    ShardingOption,
)
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.tables.table_shards import EmbeddingComputeKernel

_KERNELS = frozenset(kernel.value for kernel in EmbeddingComputeKernel)
_CACHING = frozenset({"fused_uvm_caching", "quant_uvm_caching"})


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


def validate_compute_kernels(best_plan: Sequence[ShardingOption]) -> None:
    """Check that the kernels of a plan's options fit the options.

    Args:
        best_plan: the options that were chosen, with estimates of memory.

    Raises:
        PlannerError: an unknown kernel, ordinary parameters that are cut, a cache of none or of all rows,
            or memory below 0; all violations are named.
    """
    violations = [
        f"{option.fqn}: {violation}" for option in best_plan for violation in _violations(option)
    ]
    if violations:
        raise PlannerError(
            f"the plan's compute kernels have {len(violations)} violation(s): {'; '.join(violations)}",
            PlannerErrorType.INVALID_COMPUTE_KERNEL,
        )


def _violations(option: ShardingOption) -> list[str]:
    kernel = option.compute_kernel
    if kernel not in _KERNELS:
        return [f"unknown compute kernel {kernel!r}; give one of {', '.join(sorted(_KERNELS))}"]
    found = []
    if kernel == "dense" and not strategy_of(option.sharding_type).replicated:
        found.append(
            "the DENSE kernel requires DATA_PARALLEL sharding in a planner's plan, and the table is "
            f"sharded {option.sharding_type}"
        )
    load = option.cache_load_factor
    if kernel in _CACHING and load is not None and not 0 < load < 1:
        found.append(f"cache_load_factor is {load}; give a share of the rows between 0 and 1")
    storage = option.total_storage
    found += [
        f"negative {name} storage ({size}); its estimator must give 0 or more bytes"
        for name, size in (("HBM", storage.hbm), ("DDR", storage.ddr))
        if size < 0
    ]
    return found
