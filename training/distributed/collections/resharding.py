"""Moves the tables of a sharded collection to where another plan puts them, while it is trained.

What is not changed is left alone: a sharding keeps its lookups, its memory and its communication unless
one of its tables changes or others come to it.  In place of the other shardings new ones are built, and filled from the old
(`tessera.training.distributed.collections.shard_moves`).  Then the collection takes them into use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from tessera.errors import UserError
from tessera.training.distributed.collections.shard_moves import (
    Key,
    LiveShard,
    blocks_of,
    move_shards,
)
from tessera.training.distributed.collections.sharding_part import ShardingPart
from tessera.training.distributed.comm.environment import ShardingEnv
from tessera.training.distributed.sharding.interfaces import EmbeddingShardingInfo
from tessera.training.distributed.tables.batched_kernels import FusedKernel, Kernel
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable


def moved_parts(
    old_parts: Mapping[str, ShardingPart],
    infos: Mapping[str, list[EmbeddingShardingInfo]],
    make: Callable[[str, list[EmbeddingShardingInfo]], ShardingPart],
    env: ShardingEnv,
    device: torch.device,
) -> dict[str, ShardingPart]:
    """The parts of a collection under another plan, with all that the old ones hold; every rank calls it.

    Args:
        old_parts: by the sharding's name, as they are.
        infos: by the sharding's name, the tables as the other plan places them.
        make: makes a part, whose tables hold zeros.
        env: who takes part.
        device: where this rank computes.

    Raises:
        UserError: a table that cannot be moved.
        ValueError: a placement that does not fit.
    """
    kept = {
        kind: old_parts[kind]
        for kind, own in infos.items()
        if kind in old_parts and old_parts[kind].same_tables(own)
    }
    left = [part for kind, part in old_parts.items() if kind not in kept]
    _refuse_others(left)
    made = {kind: make(kind, own) for kind, own in infos.items() if kind not in kept}
    _refuse_others(made.values())
    old_kernels = [kernel for part in left for kernel in part.kernels()]
    new_kernels = [kernel for part in made.values() for kernel in part.kernels()]
    for kernel in old_kernels:
        kernel.flush()
    move_shards(
        _per_rank(left, env.world_size),
        _per_rank(made.values(), env.world_size),
        sources=_live(old_kernels),
        targets=_live(new_kernels),
        rank=env.rank,
        pg=env.sharding_pg,
        device=device,
    )
    for kernel in new_kernels:
        kernel.purge()
    _set_steps(old_kernels, new_kernels, left, env, device)
    return {kind: kept[kind] if kind in kept else made[kind] for kind in infos}


def _refuse_others(parts: Iterable[ShardingPart]) -> None:
    """Refuse tables that cannot be moved."""
    for part in parts:
        kind = part.sharding.strategy
        for shard in part.sharding.embedding_tables():
            if kind.replicated or shard.compute_kernel.value == "dense":
                raise UserError(
                    f"table {shard.name!r} is {kind.name} with compute_kernel "
                    f"{shard.compute_kernel.value!r} under one of the plans: an optimizer of yours trains "
                    "its parameters and would lose them; move it through a checkpoint"
                )
        for kernel in part.kernels():
            if kernel.touched is not None or kernel.observers:
                raise UserError(
                    f"the trained rows of table {kernel.tables[0].name!r} are being tracked, which a move "
                    "would lose; move tables of models without a tracker"
                )


def _per_rank(parts: Iterable[ShardingPart], world_size: int) -> list[list[ShardedEmbeddingTable]]:
    ranks: list[list[ShardedEmbeddingTable]] = [[] for _ in range(world_size)]
    for part in parts:
        for own, tables in zip(ranks, part.sharding.layout.tables_per_rank, strict=True):
            own.extend(tables)
    return ranks


def _live(kernels: Iterable[Kernel]) -> dict[Key, LiveShard]:
    found: dict[Key, LiveShard] = {}
    for kernel in kernels:
        assert isinstance(kernel, FusedKernel), "others were refused"
        weights, states = kernel.split_embedding_weights(), kernel.states_by_table()
        for table, weight, own in zip(kernel.tables, weights, states, strict=True):
            for block in blocks_of([table]):
                found[block.key] = LiveShard(weight, own)
    return found


def _set_steps(
    old: Iterable[Kernel],
    new: Iterable[Kernel],
    moved: Iterable[ShardingPart],
    env: ShardingEnv,
    device: torch.device,
) -> None:
    """Let the optimizers go on counting; a rank may get tables that it never had."""
    names = sorted({shard.name for part in moved for shard in part.sharding.embedding_tables()})
    steps = torch.zeros(len(names), dtype=torch.int64, device=device)
    for kernel in old:
        assert isinstance(kernel, FusedKernel), "others were refused"
        for table in kernel.tables:
            steps[names.index(table.name)] = int(kernel.steps)
    if env.sharding_pg is not None:
        dist.all_reduce(steps, dist.ReduceOp.MAX, group=env.sharding_pg)
    counted = dict(zip(names, steps.tolist(), strict=True))
    for kernel in new:
        assert isinstance(kernel, FusedKernel), "others were refused"
        kernel.steps.fill_(max(counted[table.name] for table in kernel.tables))
