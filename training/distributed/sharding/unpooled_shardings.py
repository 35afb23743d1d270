"""The shardings of a collection of unpooled tables, by sharding type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tessera.training.distributed.comm.codec_types import QuantizedCommCodecs
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.plan.plan_types import ParameterSharding
from tessera.training.distributed.sharding.embedding_sharding import (
    EmbeddingSharding,
    TableSharding,
)
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.sharding.registry import strategy_of
from tessera.training.distributed.sharding.sharding_infos import sharding_infos, tables_of
from tessera.training.modules.embedding_configs import PoolingType
from tessera.training.modules.embedding_modules import EmbeddingCollection


def create_embedding_sharding(
    sharding_type: str,
    sharding_infos: Sequence[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> TableSharding:
    """The sharding of unpooled tables of one type.

    Raises:
        ValueError: an unknown type, or placements that do not fit it.
    """
    return EmbeddingSharding(
        strategy_of(sharding_type),
        sharding_infos,
        env,
        device,
        qcomm_codecs_registry,
        is_sequence=True,
    )


def create_sharding_infos_by_sharding(
    module: EmbeddingCollection,
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device,
    fused_params: Mapping[str, Any] | None = None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a collection by sharding type.

    Args:
        module: the collection.
        table_name_to_parameter_sharding: where each table lives.
        env: who takes part.
        device: where this rank computes.
        fused_params: the tables' optimizer.

    Raises:
        ValueError: a plan that is of other tables.
    """
    return sharding_infos(
        module.embedding_configs(),
        tables_of(module.embeddings),
        module.embedding_names_by_table(),
        table_name_to_parameter_sharding,
        world_size=env.world_size,
        device=device,
        is_weighted=False,
        pooling=PoolingType.NONE,
        fused_params=fused_params,
    )
