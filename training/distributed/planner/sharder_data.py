"""What estimators read of a sharder, as plain values that can be kept, compared and pickled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tessera.training.distributed.collections.sharders import (
    BaseEmbeddingSharder,
    BaseQuantEmbeddingSharder,
)
from tessera.training.distributed.comm.codec_types import CommOp
from tessera.training.distributed.plan.sharded_module import ModuleSharder, StorageUsageType
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.options import ShardingOption

_COLLECTIVES = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name,
)


@dataclass
class SharderData:
    """What estimators read of a sharder.

    Attributes:
        fused_params: settings of the tables' kernels and optimizer.
        qcomm_dtype_sizes: bytes of a number on its way, forward and backward, by the name of a `CommOp`
            whose numbers travel in another type.
        storage_usage_type: how the memory of its tables is counted.
    """

    fused_params: dict[str, Any] = field(default_factory=dict)
    qcomm_dtype_sizes: dict[str, tuple[float, float]] = field(default_factory=dict)
    storage_usage_type: StorageUsageType = StorageUsageType.DEFAULT


SharderDataMap = dict[str, SharderData]


def build_sharder_data(sharder: ModuleSharder[Any]) -> SharderData:
    """Read what estimators need of ``sharder``."""
    kind = StorageUsageType.DEFAULT
    if isinstance(sharder, BaseQuantEmbeddingSharder):
        kind = StorageUsageType.BASE_QUANT
    elif isinstance(sharder, BaseEmbeddingSharder):
        kind = StorageUsageType.BASE
    registry = sharder.qcomm_codecs_registry or {}
    return SharderData(
        fused_params=dict(getattr(sharder, "fused_params", None) or {}),
        qcomm_dtype_sizes={
            name: (
                _bytes_of(registry[name].forward.quantized_dtype),
                _bytes_of(registry[name].backward.quantized_dtype),
            )
            for name in _COLLECTIVES
            if name in registry
        },
        storage_usage_type=kind,
    )


def build_sharder_data_map(
    sharder_map: Mapping[str, ModuleSharder[nn.Module]],
) -> SharderDataMap:
    """Read what estimators need of several sharders, by the same keys."""
    return {key: build_sharder_data(sharder) for key, sharder in sharder_map.items()}


def _bytes_of(dtype: torch.dtype | Callable[[], torch.dtype]) -> int:
    """Return the bytes of a codec's type, which some codecs have as a property and some as a method."""
    return (dtype if isinstance(dtype, torch.dtype) else dtype()).itemsize


def is_prefetch_pipelined(sharding_option: ShardingOption, sharder_data: SharderData) -> bool:
    """Whether a table's cache is filled ahead, as its constraints say or else the sharder."""
    constraints = sharding_option.constraints
    cache = constraints.cache_params if constraints else None
    own = cache.prefetch_pipeline if cache else None
    return bool(own or sharder_data.fused_params.get("prefetch_pipeline", False))


def extract_comm_data_type_size(
    sharding_option: ShardingOption, sharder_data: SharderData
) -> tuple[float, float, float, float]:
    """Bytes of a number on its way.

    Returns:
        Forward and backward in an all-to-all, then forward and backward in a reduce-scatter; those of the
        table's type where the sharder has no codec.
    """
    usual = float(sharding_option.tensor.element_size())
    sizes = sharder_data.qcomm_dtype_sizes
    all_to_all, reduced = (usual, usual), (usual, usual)
    if sharding_option.is_pooled:
        all_to_all = sizes.get(CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name, all_to_all)
        reduced = sizes.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name, reduced)
    else:
        all_to_all = sizes.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name, all_to_all)
    return (*all_to_all, *reduced)


def get_num_poolings(
    constraints: Mapping[str, ParameterConstraints] | None, so: ShardingOption
) -> list[float]:
    """Bags of each feature of an option's table in a sample; one of each where constraints say nothing."""
    given = (constraints or {}).get(so.name) or so.constraints
    if given is not None and given.num_poolings:
        return given.num_poolings
    return [1.0] * len(so.input_lengths)
