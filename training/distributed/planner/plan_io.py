"""Plans as objects, and as JSON files that people can read and change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.errors import UserError
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
)
from tessera.training.distributed.planner.types import ShardingOption, Topology
from tessera.training.distributed.sharding.by_hand import placement
from tessera.training.distributed.sharding.registry import strategy_of

FORMAT = "tessera sharding plan 1"

# What constraints say besides a place; plan files do not hold it.
_SETTINGS = (
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "output_dtype",
    "key_value_params",
)


def to_sharding_plan(options: list[ShardingOption], topology: Topology) -> ShardingPlan:
    """The plan that placed options describe."""
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in options:
        metadata = [
            ShardMetadata(
                shard_offsets=list(shard.offset),
                shard_sizes=list(shard.size),
                placement=placement(
                    topology.compute_device, shard.place, topology.local_world_size
                ),
            )
            for shard in option.shards
        ]
        replicated = strategy_of(option.sharding_type).replicated
        constraint = option.constraints
        tables = modules.setdefault(option.path, EmbeddingModuleShardingPlan())
        tables[option.name] = ParameterSharding(
            sharding_type=option.sharding_type,
            compute_kernel=option.compute_kernel,
            ranks=[shard.place for shard in option.shards],
            sharding_spec=None if replicated else EnumerableShardingSpec(metadata),
            **{name: getattr(constraint, name) for name in _SETTINGS if constraint},
        )
    return ShardingPlan(plan=dict(modules))


def save_plan(plan: ShardingPlan, path: str | Path) -> None:
    """Write a plan as JSON.

    Raises:
        ValueError: the plan has settings that are not written: cache, rounding or bounds checks.
    """
    modules = {
        module_path: {
            name: _to_json(f"{module_path}.{name}", where) for name, where in tables.items()
        }
        for module_path, tables in plan.plan.items()
    }
    text = json.dumps({"format": FORMAT, "modules": modules}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def _to_json(name: str, where: ParameterSharding) -> dict[str, Any]:
    for setting in _SETTINGS:
        if getattr(where, setting) is not None:
            raise ValueError(
                f"{name}: {setting} is {getattr(where, setting)}; a plan file holds places only, "
                "so set it in code after load_plan"
            )
    spec = where.sharding_spec
    shards = None
    if isinstance(spec, EnumerableShardingSpec):
        shards = [
            {
                "offsets": list(shard.shard_offsets),
                "sizes": list(shard.shard_sizes),
                "placement": str(shard.placement),
            }
            for shard in spec.shards
        ]
    return {
        "sharding_type": where.sharding_type,
        "compute_kernel": where.compute_kernel,
        "ranks": where.ranks,
        "shards": shards,
    }


def load_plan(path: str | Path) -> ShardingPlan:
    """Read what `save_plan` wrote.

    Raises:
        UserError: the file is not there or is not a plan.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise UserError(f"{path}: the format is {content['format']!r}; expected {FORMAT!r}")
        modules = {
            module_path: EmbeddingModuleShardingPlan(
                {name: _from_json(where) for name, where in tables.items()}
            )
            for module_path, tables in content["modules"].items()
        }
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a sharding plan: {error}") from error
    return ShardingPlan(plan=dict(modules))


def _from_json(where: dict[str, Any]) -> ParameterSharding:
    strategy = strategy_of(where["sharding_type"])
    spec = None
    if where["shards"] is not None:
        spec = EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[int(number) for number in shard["offsets"]],
                    shard_sizes=[int(number) for number in shard["sizes"]],
                    placement=str(shard["placement"]),
                )
                for shard in where["shards"]
            ]
        )
    return ParameterSharding(
        sharding_type=strategy.name,
        compute_kernel=str(where["compute_kernel"]),
        ranks=[int(rank) for rank in where["ranks"]],
        sharding_spec=spec,
    )
