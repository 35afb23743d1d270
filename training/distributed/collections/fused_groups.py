"""The parameter groups of a collection's fused optimizer on one rank, which stay while tables move.

Schedulers of learning rates count an optimizer's groups when they are made, and set those groups from then
on.  So a rank has a group for every optimizer that tables of the collection have, on whichever rank they
are: one per kernel that holds shards here, or an empty one.  When tables move, new kernels are put into
groups of the same optimizer that were there before.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Hashable, Iterable
from typing import Any, cast

from torch import Tensor

from tessera.training.distributed.tables.batched_kernels import FusedKernel, Kernel
from tessera.training.distributed.tables.kernels.choice import FBGEMM_LOCATIONS
from tessera.training.distributed.tables.table_shards import ShardedEmbeddingTable
from tessera.training.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedParams
from tessera.training.optim.keyed import KeyedOptimizer
from tessera.training.optim.row_updates import RULES

Part = KeyedOptimizer | tuple[str, KeyedOptimizer]


def _kind(fused_params: dict[str, Any] | None) -> tuple[Hashable, dict[str, Any]]:
    """What tells an optimizer from others, and the settings that its group begins with."""
    params = FusedParams.from_dict(fused_params or {})
    numbers = params.hyper_parameters.group(RULES[params.optimizer].settings)
    return (params.optimizer, repr(sorted(numbers.items()))), numbers


class FusedGroups:
    """Assigns kernels to groups, and makes an optimizer of each group.

    Args:
        shards: of the collection's tables, of all ranks.
        kernels: on this rank; each brings its group.
    """

    def __init__(self, shards: Iterable[ShardedEmbeddingTable], kernels: Iterable[Kernel]) -> None:
        # Per group what optimizer it is of; the dictionaries are what schedulers hold.
        self._groups: list[tuple[Hashable, dict[str, Any]]] = [
            (_kind(kernel.config.fused_params)[0], kernel.fused_optimizer.param_groups[0])
            for kernel in kernels
            if isinstance(kernel, FusedKernel)
        ]
        for shard in shards:
            if shard.compute_kernel not in FBGEMM_LOCATIONS:
                continue
            kind, numbers = _kind(shard.fused_params)
            if all(kind != known for known, _ in self._groups):
                self._groups.append((kind, {"params": [], **numbers}))

    def take(self, kernels: Iterable[Kernel]) -> None:
        """Put new kernels into groups, whose settings they have from then on.

        Args:
            kernels: all that hold shards here from now on; those that were here keep their groups.
        """
        fused = [kernel for kernel in kernels if isinstance(kernel, FusedKernel)]
        taken = {id(kernel.fused_optimizer.param_groups[0]) for kernel in fused}
        known = {id(group) for _, group in self._groups}
        for kernel in fused:
            groups = kernel.fused_optimizer.param_groups
            if id(groups[0]) in known:
                continue
            kind = _kind(kernel.config.fused_params)[0]
            alike = [group for own, group in self._groups if own == kind]
            free = [group for group in alike if id(group) not in taken]
            if alike:
                groups[0] = (free or alike)[0]
            else:  # a placement that brings settings of its own
                self._groups.append((kind, groups[0]))
            taken.add(id(groups[0]))

    def parts(self, prefix: str, kernels: Iterable[Kernel]) -> list[Part]:
        """One optimizer per group, under ``<prefix>.<table>.weight``; never none."""
        by_group: dict[int, list[FusedOptimizer]] = {}
        for kernel in kernels:
            if isinstance(kernel, FusedKernel):
                own = kernel.fused_optimizer
                by_group.setdefault(id(own.param_groups[0]), []).append(own)
        found: list[Part] = []
        for _, group in self._groups:
            optimizers = by_group.get(id(group), [])
            group["params"] = [p for own in optimizers for p in own.params.values()]
            found.append((prefix, _one(optimizers, group)))
        return found or [EmptyFusedOptimizer()]


def _one(optimizers: list[FusedOptimizer], group: dict[str, Any]) -> FusedOptimizer:
    if len(optimizers) == 1:
        return optimizers[0]
    params = {name: weight for own in optimizers for name, weight in own.params.items()}
    states = ChainMap(*(cast("dict[Tensor, Any]", own.state) for own in optimizers))
    return FusedOptimizer(params, states, [group])
