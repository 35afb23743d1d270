"""From a collection and its plan to what each sharding must know of its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training.distributed.plan.plan_types import ParameterSharding, ShardingType
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
)
from tessera.training.optim.apply_optimizer_in_backward import fused_params_of as optimizer_of

# Settings that say how a table is stored, whatever its optimizer is.
_STORAGE = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "enforce_hbm",
        "gradient_clipping",
        "max_gradient",
        "output_dtype",
        "prefetch_pipeline",
        "stochastic_rounding",
    }
)


def fused_params_of(
    sharder_params: Mapping[str, Any] | None, placement: ParameterSharding, parameter: Tensor
) -> dict[str, Any]:
    """The settings of one table's kernel.

    Args:
        sharder_params: the sharder's, for all tables.
        placement: its own settings go before those.
        parameter: an optimizer that ``apply_optimizer_in_backward`` gave it goes before both.
    """
    own = optimizer_of(parameter) if isinstance(parameter, nn.Parameter) else None
    params = dict(sharder_params or {})
    if own is not None:
        params = {name: value for name, value in params.items() if name in _STORAGE} | own
    cache = placement.cache_params
    if cache is not None:
        params.update(
            {
                f"cache_{name}": value
                for name in ("algorithm", "load_factor", "reserved_memory", "precision")
                if (value := getattr(cache, name)) is not None
            }
        )
    for name in ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype"):
        value = getattr(placement, name)
        if value is not None:
            params[name] = value
    return params


def check_plan(
    tables: Sequence[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding]
) -> None:
    """Refuse a plan that is of other tables.

    Raises:
        ValueError: naming both.
    """
    names = {table.name for table in tables}
    if set(plan) != names:
        raise ValueError(f"the plan places tables {sorted(plan)}, the module has {sorted(names)}")


def completed(
    placement: ParameterSharding, parameter: Tensor, world_size: int | None, device: torch.device
) -> ParameterSharding:
    """``placement`` with its shards listed; a whole table needs no list to be understood."""
    strategy = strategy_of(placement.sharding_type)
    if placement.sharding_spec is not None or strategy.replicated:
        return placement
    ranks = placement.ranks or ([0] if world_size == 1 else [])
    if placement.sharding_type != ShardingType.TABLE_WISE.value or len(ranks) != 1:
        return placement
    where = f"rank:{ranks[0]}/{device}"
    spec = EnumerableShardingSpec([ShardMetadata([0, 0], list(parameter.shape), where)])
    fields = {**vars(placement), "ranks": ranks, "sharding_spec": spec}
    return ParameterSharding(**fields)


def sharding_infos(
    tables: Sequence[BaseEmbeddingConfig],
    parameters: Mapping[str, nn.Parameter],
    embedding_names: Sequence[Sequence[str]],
    plan: Mapping[str, ParameterSharding],
    *,
    world_size: int | None,
    device: torch.device,
    is_weighted: bool,
    pooling: PoolingType | None,
    has_feature_processor: bool = False,
    fused_params: Mapping[str, Any] | None = None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables by sharding type, in the tables' order.

    Args:
        tables: of the collection.
        parameters: their values by name; on the ``meta`` device they have none yet.
        embedding_names: the output's names of each table's features.
        plan: where each table lives.
        world_size: number of ranks; None: unknown.
        device: where this rank computes.
        is_weighted: whether ids carry weights.
        pooling: of all tables; None: each one's own.
        has_feature_processor: whether the lookups put weights on ids.
        fused_params: the sharder's.

    Raises:
        ValueError: a plan that is of other tables.
    """
    check_plan(tables, plan)
    by_type: dict[str, list[EmbeddingShardingInfo]] = {}
    for table, names in zip(tables, embedding_names, strict=True):
        parameter = parameters[table.name]
        placement = completed(plan[table.name], parameter, world_size, device)
        own = {own.name: getattr(table, own.name) for own in fields(BaseEmbeddingConfig)}
        config = EmbeddingTableConfig(
            **{**own, "feature_names": list(table.feature_names)},
            pooling=getattr(table, "pooling", PoolingType.SUM) if pooling is None else pooling,
            is_weighted=is_weighted,
            has_feature_processor=has_feature_processor,
            embedding_names=list(names),
        )
        by_type.setdefault(placement.sharding_type, []).append(
            EmbeddingShardingInfo(
                embedding_config=config,
                param_sharding=placement,
                param=parameter,
                fused_params=fused_params_of(fused_params, placement, parameter),
            )
        )
    return by_type


def tables_of(tables: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a collection's tables by table name, of the module that holds them."""
    return {name.split(".")[0]: parameter for name, parameter in tables.named_parameters()}
