"""Placements that people write: what the ``by_hand`` functions of strategies are made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.errors import refuse_unknown
from tessera.training.distributed.plan.plan_types import ParameterSharding, ShardingType
from tessera.training.distributed.plan.shard_sizes import Piece, TableToCut, column_blocks
from tessera.training.distributed.plan.sharded_module import ModuleSharder
from tessera.training.distributed.sharding.registry import ShardingStrategy
from tessera.training.optim.optimizers import IN_BACKWARD_OPTIMIZERS

ParameterShardingGenerator = Callable[
    [nn.Parameter, int, int, str, ModuleSharder[Any]], ParameterSharding
]
"""(table ``[rows, columns]``, ranks per node, ranks, device type, sharder) to its placement."""

Shards = Sequence[tuple[Piece, int]]
"""Rectangles and their ranks."""


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """``rank:3/cuda:1``: a rank and its device, in nodes of ``local_size`` ranks."""
    device = f"{compute_device}:{rank % local_size}" if compute_device != "cpu" else "cpu"
    return f"rank:{rank}/{device}"


def _kernel(
    wanted: str | None,
    param: nn.Parameter,
    sharding_type: str,
    device_type: str,
    sharder: ModuleSharder[Any],
) -> str:
    offered = sharder.compute_kernels(sharding_type, device_type)
    if "fused" in offered:
        offered = ["dense", *offered]
        if wanted is None and hasattr(param, IN_BACKWARD_OPTIMIZERS):
            return "fused"
        if wanted is None:
            settings = getattr(sharder, "fused_params", None) or {}
            if sharding_type != ShardingType.DATA_PARALLEL.value and "optimizer" in settings:
                warnings.warn(
                    f"the sharder's optimizer ({settings['optimizer']}) does not update a table that "
                    f"the plan places {sharding_type} without a compute_kernel: its rows are ordinary "
                    "parameters, as in TorchRec; give compute_kernel='fused', or 'dense' to say so",
                    stacklevel=4,
                )
            return "dense"
    if wanted is None:
        return offered[0]
    refuse_unknown(f"compute_kernel for {sharding_type} on {device_type}", wanted, offered)
    return wanted


def placed_by(
    strategy: ShardingStrategy,
    compute_kernel: str | None,
    shards_of: Callable[[TableToCut], Shards],
) -> ParameterShardingGenerator:
    """The placement of a table by a strategy.

    Args:
        strategy: whose shards they are.
        compute_kernel: None, as in TorchRec: ``fused`` for a table whose optimizer works in the
            backward pass (`apply_optimizer_in_backward`), else ``dense``; of quantized tables the
            first one that the sharder offers.
        shards_of: the shards of a table; it may raise ValueError for one that it cannot cut.
    """

    def generate(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[Any],
    ) -> ParameterSharding:
        rows, columns = param.shape
        shards = shards_of(
            TableToCut(rows=rows, columns=columns, world_size=world_size, local_size=local_size)
        )
        # Whole copies overlap, which a specification may not.
        spec = None
        if not strategy.replicated:
            spec = EnumerableShardingSpec(
                [
                    ShardMetadata(offset, size, placement(device_type, rank, local_size))
                    for (size, offset), rank in shards
                ]
            )
        return ParameterSharding(
            sharding_type=strategy.name,
            compute_kernel=_kernel(compute_kernel, param, strategy.name, device_type, sharder),
            ranks=[rank for _, rank in shards],
            sharding_spec=spec,
        )

    return generate


def one_per_rank(pieces: Sequence[Piece]) -> Shards:
    """Piece ``i`` on rank ``i``."""
    return list(zip(pieces, range(len(pieces)), strict=True))


def check_rank(name: str, rank: int, count: int) -> None:
    """Raise a ValueError for a rank or node outside the world, naming the argument."""
    if not 0 <= rank < count:
        raise ValueError(f"{name} is {rank}; give 0 to {count - 1}")


def ranks_of_node(name: str, node: int, table: TableToCut) -> range:
    """The ranks of a node, or a ValueError: there is no such node."""
    check_rank(name, node, table.world_size // table.local_size)
    return range(node * table.local_size, (node + 1) * table.local_size)


def column_shards(table: TableToCut, ranks: Sequence[int], widths: Sequence[int] | None) -> Shards:
    """A block of columns on each of ``ranks`` (or nodes), equally wide if ``widths`` is None.

    Raises:
        ValueError: widths that do not add up to the table's.
    """
    if widths is None:
        if not ranks or table.columns % len(ranks):
            raise ValueError(
                f"ranks is {list(ranks)}; {table.columns} columns do not divide evenly among "
                f"{len(ranks)} shards, so give size_per_rank too"
            )
        widths = [table.columns // len(ranks)] * len(ranks)
    if len(widths) != len(ranks) or sum(widths) != table.columns or min(widths) <= 0:
        raise ValueError(
            f"size_per_rank is {list(widths)}; give {len(ranks)} positive numbers that add up to "
            f"the table's {table.columns} columns"
        )
    return list(zip(column_blocks(table.rows, widths), ranks, strict=True))
