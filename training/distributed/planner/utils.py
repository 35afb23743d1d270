"""Units and names that programs which plan by themselves use; TorchRec's names for them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.hardware import Storage
from tessera.training.distributed.planner.shard_estimators import type_name
from tessera.training.distributed.planner.sharder_data import (
    build_sharder_data,
    build_sharder_data_map,
    extract_comm_data_type_size,
    get_num_poolings,
    is_prefetch_pipelined,
)
from tessera.training.distributed.planner.types import ShardingOption
from tessera.training.distributed.sharding.by_hand import placement

__all__ = [
    "build_sharder_data",
    "build_sharder_data_map",
    "bytes_to_gb",
    "bytes_to_mb",
    "extract_comm_data_type_size",
    "gb_to_bytes",
    "get_num_poolings",
    "is_prefetch_pipelined",
    "mb_to_bytes",
    "placement",
    "prod",
    "reset_shard_rank",
    "sharder_name",
    "storage_repr_in_gb",
]

_MIB = 1024**2


def sharder_name(t: type[nn.Module]) -> str:
    """The name of a type of module in the ``sharder_map`` that estimators are given."""
    return type_name(t)


def reset_shard_rank(proposal: Iterable[ShardingOption]) -> None:
    """Forget on which ranks the shards of options were put, in place."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def bytes_to_gb(num_bytes: int) -> float:
    """Gibibytes of bytes."""
    return num_bytes / GIB


def bytes_to_mb(num_bytes: float) -> float:
    """Mebibytes of bytes."""
    return num_bytes / _MIB


def gb_to_bytes(gb: float) -> int:
    """Bytes of gibibytes, rounded down."""
    return int(gb * GIB)


def mb_to_bytes(mb: float) -> int:
    """Bytes of mebibytes, rounded down."""
    return int(mb * _MIB)


def prod(iterable: Iterable[int]) -> int:
    """The product of numbers; 1 of none."""
    return math.prod(iterable)


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Memory in gibibytes, for messages."""
    if storage is None:
        return ""
    parts = {"hbm": storage.hbm, "ddr": storage.ddr, "ssd": storage.ssd}
    shown = ", ".join(f"{name}: {round(size / GIB, 3)} GB" for name, size in parts.items())
    return f"Storage({shown})"
