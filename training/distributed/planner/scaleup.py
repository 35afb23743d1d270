"""Caches in device memory that grow into what the tables leave of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tessera.training.distributed.plan.plan_types import CacheParams
from tessera.training.distributed.planner import constants
from tessera.training.distributed.planner.constraints import ParameterConstraints
from tessera.training.distributed.planner.search import Proposals, Search
from tessera.training.distributed.planner.types import Shard, ShardingOption

_CACHED, _WHOLE = "fused_uvm_caching", "fused"


@dataclass(frozen=True)
class _Cache:
    """A table with a cache: its way with the smallest cache, and its way wholly in device memory.

    Attributes:
        bytes_whole: device memory that the whole table takes more than the cached one.
        milliseconds: time that it takes less.
    """

    option: ShardingOption
    load_factor: float
    whole: ShardingOption | None
    bytes_whole: int
    milliseconds: float

    def grown(self, share: float) -> ShardingOption:
        """The table with ``share`` of what is missing of it in device memory, 0 to 1."""
        if share >= 1.0 and self.whole is not None:
            return self.whole
        return _with_load(self.option, self.load_factor + share * (1.0 - self.load_factor))


class EmbeddingOffloadScaleupProposer(Search):
    """Gives the device memory that is left to the caches of tables whose rows lie in host memory.

    Starts with every table's way of the kernel ``fused_uvm_caching`` with the cache that its constraints
    say, and the fastest way of tables that have none.  Then caches grow, those first that gain most
    milliseconds per byte; a table whose cache would hold all of it takes the kernel ``fused``, where
    that is allowed.  How much memory the caches can take is searched by halving, because shards must
    fit rank by rank.  The idea of scaling caches into what is left is TorchRec's.

    Args:
        max_proposals: combinations to try.
    """

    def __init__(self, max_proposals: int = 16) -> None:
        self._max = max_proposals

    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        enumerator = self._enumerator
        if enumerator is None or not tables:
            return
        start = [
            next((o for o in ways if o.compute_kernel == _CACHED), ways[0])
            for ways in tables.values()
        ]
        caches = {
            place: self._cache(option, ways)
            for place, (option, ways) in enumerate(zip(start, tables.values(), strict=True))
            if option.compute_kernel == _CACHED
        }
        outcome = yield start
        if outcome.rating is None or outcome.room is None or not caches:
            return
        used = sum(option.total_storage.hbm for option in start)
        wanted = sum(cache.bytes_whole for cache in caches.values())
        fits, too_much, budget = 0, math.inf, min(wanted, outcome.room - used)
        for _ in range(self._max - 1):
            if budget <= fits:
                return
            proposal = self._spend(start, caches, budget)
            outcome = yield proposal
            if outcome.rating is not None:
                fits = budget
                if math.isinf(too_much):
                    return
            else:
                too_much = budget
            budget = (fits + int(too_much)) // 2

    def _cache(self, option: ShardingOption, ways: list[ShardingOption]) -> _Cache:
        full = _with_load(option, 1.0)
        self._estimate([full])
        whole = next(
            (
                way
                for way in ways
                if way.compute_kernel == _WHOLE and way.sharding_type == option.sharding_type
            ),
            None,
        )
        last = whole or full
        return _Cache(
            option=option,
            load_factor=_load_of(option),
            whole=whole,
            bytes_whole=last.total_storage.hbm - option.total_storage.hbm,
            milliseconds=option.total_perf - last.total_perf,
        )

    def _spend(
        self, start: list[ShardingOption], caches: dict[int, _Cache], budget: int
    ) -> list[ShardingOption]:
        """``start`` with ``budget`` bytes more of caches, where they gain most."""
        proposal, left, grown = list(start), budget, []
        gains = sorted(
            caches.items(), key=lambda item: item[1].milliseconds / max(1, item[1].bytes_whole)
        )
        for place, cache in reversed(gains):
            if cache.milliseconds <= 0:
                break
            share = min(1.0, left / cache.bytes_whole) if cache.bytes_whole > 0 else 1.0
            if share <= 0:
                break
            proposal[place] = cache.grown(share)
            if proposal[place] is not cache.whole:
                grown.append(proposal[place])
            left -= int(share * max(0, cache.bytes_whole))
        self._estimate(grown)
        return proposal

    def _estimate(self, options: list[ShardingOption]) -> None:
        assert self._enumerator is not None, "a search has an enumerator"
        self._enumerator.populate_estimates(options)


def _load_of(option: ShardingOption) -> float:
    cache = option.constraints.cache_params if option.constraints else None
    given = cache.load_factor if cache else None
    return constants.CACHE_LOAD_FACTOR if given is None else given


def _with_load(option: ShardingOption, load_factor: float) -> ShardingOption:
    """The same way with a cache of another size, not yet estimated."""
    constraints = option.constraints or ParameterConstraints()
    cache = replace(constraints.cache_params or CacheParams(), load_factor=load_factor)
    return replace(
        option,
        constraints=replace(constraints, cache_params=cache),
        shards=[Shard(list(shard.size), list(shard.offset)) for shard in option.shards],
    )
