"""Which sharding serves which tables of a pooled collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device

from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingSharding,
    TableSharding,
)
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.sharding.sharding_infos import sharding_infos
from tessera.training.modules.embedding_modules import EmbeddingBagCollection


def create_embedding_bag_sharding(  # noqa: PLR0917 - the signature TorchRec users know
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    permute_embeddings: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> TableSharding:
    """The sharding of pooled tables of one type.

    Args:
        sharding_type: of all of the tables.
        sharding_infos: the tables and where they are.
        env: who takes part.
        device: where this rank computes; None: the CPU.
        permute_embeddings: whether the output's columns come in the tables' order, the parts of
            a vector side by side; otherwise they come rank by rank.
        qcomm_codecs_registry: how vectors are written for the network, by `CommOp` name.

    Raises:
        ValueError: an unknown type, or placements that do not fit it.
    """
    return EmbeddingSharding(
        strategy_of(sharding_type),
        sharding_infos,
        env,
        device,
        qcomm_codecs_registry,
        permute_embeddings=permute_embeddings,
    )


def create_sharding_infos_by_sharding(
    module: EmbeddingBagCollection,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    prefix: str = "embedding_bags.",
    fused_params: Mapping[str, Any] | None = None,
    suffix: str = "weight",
    *,
    world_size: int | None = None,
    device: torch.device | None = None,
    has_feature_processor: bool = False,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a collection by sharding type.

    Args:
        module: the collection; its parameters are called ``<prefix><table>.<suffix>``.
        table_name_to_parameter_sharding: where each table lives.
        prefix: see ``module``.
        fused_params: the tables' optimizer.
        suffix: see ``module``.
        world_size: number of ranks; None: unknown, and every placement must list its shards.
        device: where this rank computes; None: the CPU.
        has_feature_processor: whether the lookups put weights on ids.

    Raises:
        ValueError: a plan that is of other tables.
    """
    tables = module.embedding_bag_configs()
    names = iter(module.embedding_names())
    parameters = dict(module.named_parameters())
    return sharding_infos(
        tables,
        {table.name: parameters[f"{prefix}{table.name}.{suffix}"] for table in tables},
        [[next(names) for _ in table.feature_names] for table in tables],
        table_name_to_parameter_sharding,
        world_size=world_size,
        device=device or torch.device("cpu"),
        is_weighted=module.is_weighted(),
        pooling=None,
        has_feature_processor=has_feature_processor,
        fused_params=fused_params,
    )


def replace_placement_with_meta_device(sharding_infos: Sequence[EmbeddingShardingInfo]) -> None:
    """Move the placements of tables on the ``meta`` device there: nothing of them is anywhere."""
    for info in sharding_infos:
        spec = info.param_sharding.sharding_spec
        if info.param.is_meta and isinstance(spec, EnumerableShardingSpec):
            for shard in spec.shards:
                if shard.placement is not None:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/meta")
