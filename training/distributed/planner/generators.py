"""Plans written by hand: one function per sharding type, each says where one table's shards go.

``construct_module_sharding_plan(ebc, {"t1": table_wise(rank=0), "t2": row_wise()}, ...)`` makes
the plan of one module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.comm.nodes import get_local_size
from tessera.training.distributed.plan.plan_types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tessera.training.distributed.plan.shard_sizes import row_pieces
from tessera.training.distributed.plan.sharded_module import ModuleSharder

ParameterShardingGenerator = Callable[
    [nn.Parameter, int, int, str, ModuleSharder[Any]], ParameterSharding
]
"""(table ``[rows, columns]``, ranks per node, ranks, device type, sharder) to its placement."""

# Sizes [rows, columns], offsets [first row, first column], rank.
_Shard = tuple[list[int], list[int], int]
# (table, ranks per node, ranks) to its shards.
_Cut = Callable[[nn.Parameter, int, int], list[_Shard]]


_DEFAULT_SHARDERS = {
    "tessera.training.distributed.collections.pooled": "EmbeddingBagCollectionSharder",
    "tessera.training.distributed.collections.unpooled": "EmbeddingCollectionSharder",
    "tessera.training.distributed.collections.feature_processed": "FeatureProcessedEmbeddingBagCollectionSharder",
    "tessera.training.distributed.inference.pooled": "QuantEmbeddingBagCollectionSharder",
    "tessera.training.distributed.inference.unpooled": "QuantEmbeddingCollectionSharder",
}


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """One sharder per type of collection, each with its default optimizer."""
    # The sharded modules are imported when they are asked for: some of them need this module.
    return [
        getattr(importlib.import_module(module), name)()
        for module, name in _DEFAULT_SHARDERS.items()
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[Any]]:
    """The default sharders by the type of module that they take."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """``rank:3/cuda:1``: a rank and its device, in nodes of ``local_size`` ranks."""
    device = f"{compute_device}:{rank % local_size}" if compute_device != "cpu" else "cpu"
    return f"rank:{rank}/{device}"


def _kernel(
    wanted: str | None, sharding_type: str, device_type: str, sharder: ModuleSharder[Any]
) -> str:
    offered = sharder.compute_kernels(sharding_type, device_type)
    if wanted is not None:
        if wanted not in offered:
            raise ValueError(
                f"compute_kernel is {wanted!r}; {sharding_type} on {device_type} has "
                f"{', '.join(offered)}"
            )
        return wanted
    best = [kernel for kernel in ("fused", "quant") if kernel in offered]
    return (best or offered)[0]


def _generator(
    kind: ShardingType, compute_kernel: str | None, cut: _Cut
) -> ParameterShardingGenerator:
    def generate(
        param: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[Any],
    ) -> ParameterSharding:
        shards = cut(param, local_size, world_size)
        spec = None
        # Whole copies overlap, which a specification may not.
        if kind is not ShardingType.DATA_PARALLEL:
            spec = EnumerableShardingSpec(
                [
                    ShardMetadata(offset, size, placement(device_type, rank, local_size))
                    for size, offset, rank in shards
                ]
            )
        return ParameterSharding(
            sharding_type=kind.value,
            compute_kernel=_kernel(compute_kernel, kind.value, device_type, sharder),
            ranks=[rank for _, _, rank in shards],
            sharding_spec=spec,
        )

    return generate


def _check_rank(name: str, rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise ValueError(f"{name} is {rank}; give 0 to {count - 1}")


def data_parallel(compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """Every rank holds the whole table; gradients are averaged."""

    def cut(param: nn.Parameter, _local_size: int, world_size: int) -> list[_Shard]:
        return [(list(param.shape), [0, 0], rank) for rank in range(world_size)]

    return _generator(ShardingType.DATA_PARALLEL, compute_kernel, cut)


def table_wise(rank: int, compute_kernel: str | None = None) -> ParameterShardingGenerator:
    """The whole table lives on ``rank``."""

    def cut(param: nn.Parameter, _local_size: int, world_size: int) -> list[_Shard]:
        _check_rank("rank", rank, world_size)
        return [(list(param.shape), [0, 0], rank)]

    return _generator(ShardingType.TABLE_WISE, compute_kernel, cut)


def row_wise(
    sizes: Sequence[int] | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Every rank holds a block of rows.

    Args:
        sizes: rows of each rank; None: ``ceil(rows / ranks)`` each, less or none on the last.
        compute_kernel: None: the best one that the sharder offers.
    """

    def cut(param: nn.Parameter, _local_size: int, world_size: int) -> list[_Shard]:
        rows, columns = param.shape
        if sizes is None:
            blocks, offsets = row_pieces(rows, columns, world_size)
        else:
            if len(sizes) != world_size or sum(sizes) != rows or min(sizes) < 0:
                raise ValueError(
                    f"sizes is {list(sizes)}; give {world_size} numbers that add up to the "
                    f"table's {rows} rows"
                )
            blocks = [[size, columns] for size in sizes]
            offsets = [[sum(sizes[:index]), 0] for index in range(world_size)]
        return list(zip(blocks, offsets, range(world_size), strict=True))

    return _generator(ShardingType.ROW_WISE, compute_kernel, cut)


def _column_pieces(
    param: nn.Parameter, ranks: Sequence[int], widths: Sequence[int] | None
) -> list[_Shard]:
    rows, columns = param.shape
    if widths is None:
        if not ranks or columns % len(ranks):
            raise ValueError(
                f"ranks is {list(ranks)}; {columns} columns do not divide evenly among "
                f"{len(ranks)} shards, so give size_per_rank too"
            )
        widths = [columns // len(ranks)] * len(ranks)
    if len(widths) != len(ranks) or sum(widths) != columns or min(widths) <= 0:
        raise ValueError(
            f"size_per_rank is {list(widths)}; give {len(ranks)} positive numbers that add up to "
            f"the table's {columns} columns"
        )
    return [
        ([rows, width], [0, sum(widths[:index])], rank)
        for index, (width, rank) in enumerate(zip(widths, ranks, strict=True))
    ]


def column_wise(
    ranks: Sequence[int] | None = None,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Blocks of columns live on ``ranks``.

    Args:
        ranks: the rank of each block; a rank may hold several.  None: the first ranks, one block
            each.
        size_per_rank: columns of each block; None: equal blocks.
        compute_kernel: None: the best one that the sharder offers.

    Raises:
        ValueError: both are None.
    """
    if ranks is None:
        if size_per_rank is None:
            raise ValueError("ranks and size_per_rank are both None; give at least one")
        ranks = range(len(size_per_rank))
    wanted = list(ranks)

    def cut(param: nn.Parameter, _local_size: int, world_size: int) -> list[_Shard]:
        for rank in wanted:
            _check_rank("ranks", rank, world_size)
        return _column_pieces(param, wanted, size_per_rank)

    return _generator(ShardingType.COLUMN_WISE, compute_kernel, cut)


def table_column_wise(
    host_index: int,
    size_per_rank: Sequence[int] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Blocks of columns live on the ranks of one node.

    Args:
        host_index: the node.
        size_per_rank: columns of each of its ranks, from its first on; None: equal blocks.
        compute_kernel: None: the best one that the sharder offers.
    """

    def cut(param: nn.Parameter, local_size: int, world_size: int) -> list[_Shard]:
        _check_rank("host_index", host_index, world_size // local_size)
        first = host_index * local_size
        blocks = local_size if size_per_rank is None else len(size_per_rank)
        return _column_pieces(param, range(first, first + blocks), size_per_rank)

    return _generator(ShardingType.TABLE_COLUMN_WISE, compute_kernel, cut)


def table_row_wise(
    host_index: int, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Blocks of rows live on the ranks of one node."""

    def cut(param: nn.Parameter, local_size: int, world_size: int) -> list[_Shard]:
        _check_rank("host_index", host_index, world_size // local_size)
        first = host_index * local_size
        sizes, offsets = row_pieces(param.shape[0], param.shape[1], local_size)
        return list(zip(sizes, offsets, range(first, first + local_size), strict=True))

    return _generator(ShardingType.TABLE_ROW_WISE, compute_kernel, cut)


def grid_shard(
    host_indexes: Sequence[int], compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Each node of ``host_indexes`` holds a block of columns, cut into rows among its ranks."""

    def cut(param: nn.Parameter, local_size: int, world_size: int) -> list[_Shard]:
        shards: list[_Shard] = []
        for (rows, width), (_, column), host in _column_pieces(param, host_indexes, None):
            _check_rank("host_indexes", host, world_size // local_size)
            first = host * local_size
            sizes, offsets = row_pieces(rows, width, local_size, column)
            shards += zip(sizes, offsets, range(first, first + local_size), strict=True)
        return shards

    return _generator(ShardingType.GRID_SHARD, compute_kernel, cut)


def get_sharding_constructor_from_type(
    sharding_type: ShardingType,
) -> Callable[..., ParameterShardingGenerator]:
    """The function above that goes with a sharding type."""
    constructors: dict[ShardingType, Callable[..., ParameterShardingGenerator]] = {
        ShardingType.DATA_PARALLEL: data_parallel,
        ShardingType.TABLE_WISE: table_wise,
        ShardingType.ROW_WISE: row_wise,
        ShardingType.COLUMN_WISE: column_wise,
        ShardingType.TABLE_COLUMN_WISE: table_column_wise,
        ShardingType.TABLE_ROW_WISE: table_row_wise,
        ShardingType.GRID_SHARD: grid_shard,
    }
    return constructors[sharding_type]


def _sharder_for(module: nn.Module, sharder: ModuleSharder[Any] | None) -> ModuleSharder[Any]:
    found = sharder or get_module_to_default_sharders().get(type(module))
    if found is None or not isinstance(module, found.module_type):
        takes = "no default sharder takes it" if found is None else f"not {type(found).__name__}'s"
        raise ValueError(f"module is a {type(module).__name__}, {takes}; give its own sharder")
    return found


def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """The same placement for every table of ``module``.

    Raises:
        ValueError: no sharder takes the module.
    """
    tables = _sharder_for(module, sharder).shardable_parameters(module)
    return dict.fromkeys(tables, parameter_sharding_generator)


def construct_module_sharding_plan(  # noqa: PLR0917 - the signature TorchRec users know
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one module.

    Args:
        module: what is to be sharded, on any device.
        per_param_sharding: by table name, one of this module's functions called.
        sharder: None: the default one for the module's type.
        local_size: ranks per node; None: what the environment says.
        world_size: None: the default process group's.
        device_type: None: ``cuda`` where there is one, else ``cpu``.

    Raises:
        ValueError: other tables than the module's, a placement outside the world, or no sharder.
    """
    sharder = _sharder_for(module, sharder)
    tables = sharder.shardable_parameters(module)
    if set(tables) != set(per_param_sharding):
        raise ValueError(
            f"per_param_sharding places tables {sorted(per_param_sharding)}, the module has "
            f"{sorted(tables)}"
        )
    world_size = dist.get_world_size() if world_size is None else world_size
    local_size = get_local_size(world_size) if local_size is None else local_size
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return EmbeddingModuleShardingPlan(
        {
            name: per_param_sharding[name](param, local_size, world_size, device_type, sharder)
            for name, param in tables.items()
        }
    )


def balanced_table_wise_plan(
    modules: Mapping[str, tuple[nn.Module, ModuleSharder[Any]]],
    env: ShardingEnv,
    device_type: str,
) -> ShardingPlan:
    """Whole tables, largest first, each on the rank that holds the fewest numbers so far.

    Args:
        modules: by path, what is sharded and by whom.
        env: who takes part.
        device_type: where the ranks compute.
    """
    tables = [
        (path, name, param)
        for path, (module, sharder) in modules.items()
        for name, param in sharder.shardable_parameters(module).items()
    ]
    held = [0] * env.world_size
    rank_of: dict[tuple[str, str], int] = {}
    for path, name, param in sorted(tables, key=lambda table: -table[2].numel()):
        rank = held.index(min(held))
        rank_of[path, name] = rank
        held[rank] += param.numel()
    local_size = get_local_size(env.world_size)
    return ShardingPlan(
        {
            path: construct_module_sharding_plan(
                module,
                {
                    name: table_wise(rank_of[path, name])
                    for name in sharder.shardable_parameters(module)
                },
                sharder,
                local_size,
                env.world_size,
                device_type,
            )
            for path, (module, sharder) in modules.items()
        }
    )
