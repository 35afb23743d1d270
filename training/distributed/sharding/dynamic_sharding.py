"""What differs between two plans: what tables are moved by while a model is trained.

The names are those of TorchRec's ``dynamic_sharding``.  Give `output_sharding_plans_delta`'s result to
`DistributedModelParallel.reshard`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.errors import UserError
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)

_BYTES_PER_NUMBER = 4
_BYTES_PER_MIB = 1024 * 1024


def output_sharding_plan_delta_single(
    old_plan: Mapping[str, ParameterSharding],
    new_plan: Mapping[str, ParameterSharding],
    return_data_volume: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> tuple[float, EmbeddingModuleShardingPlan]:
    """The tables of one module that a new plan places otherwise.

    Args:
        old_plan: where each table is.
        new_plan: where each table shall be; of the same tables.
        return_data_volume: whether the size of those tables is added up.

    Returns:
        MiB of the tables' weights, each number counted as 4 bytes, or 0; and their new placements.

    Raises:
        UserError: the plans are of different tables.
    """
    if set(old_plan) != set(new_plan):
        raise UserError(
            f"old_plan places tables {sorted(old_plan)}, new_plan {sorted(new_plan)}; give plans of the "
            "same tables"
        )
    changed = EmbeddingModuleShardingPlan(
        {name: where for name, where in new_plan.items() if where != old_plan[name]}
    )
    volume = sum(_numbers(where) for where in changed.values()) if return_data_volume else 0
    return volume * _BYTES_PER_NUMBER / _BYTES_PER_MIB, changed


def _numbers(where: ParameterSharding) -> int:
    spec = where.sharding_spec
    shards = spec.shards if isinstance(spec, EnumerableShardingSpec) else []
    return sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards)


def output_sharding_plans_delta(
    old_plan: Mapping[str, EmbeddingModuleShardingPlan],
    new_plan: Mapping[str, EmbeddingModuleShardingPlan],
    return_data_volume: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
) -> dict[str, tuple[float, EmbeddingModuleShardingPlan]]:
    """The same for every module of a model: ``ShardingPlan.plan`` before and after, by module path.

    Raises:
        UserError: ``new_plan`` lacks a module, or places other tables in one.
    """
    for path in old_plan:
        if path not in new_plan:
            raise UserError(f"new_plan has no module {path!r}; give plans of the same modules")
    return {
        path: output_sharding_plan_delta_single(plan, new_plan[path], return_data_volume)
        for path, plan in old_plan.items()
    }
