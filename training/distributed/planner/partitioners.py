"""Placing shards on ranks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, unique

import numpy as np
import numpy.typing as npt

from tessera.training.distributed.planner.constants import GIB
from tessera.training.distributed.planner.perf_models import NoopPerfModel
from tessera.training.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    PerfModel,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Storage,
    Topology,
)

Numbers = npt.NDArray[np.float64]


@unique
class SortBy(Enum):
    """Which options are placed first: the largest by this."""

    STORAGE = "storage"
    PERF = "perf"


class _Ranks:
    """What every rank has left, and how busy it is."""

    def __init__(self, topology: Topology) -> None:
        storage = [device.storage for device in topology.devices]
        self.hbm: Numbers = np.array([amount.hbm for amount in storage], dtype=np.float64)
        self.ddr: Numbers = np.array([amount.ddr for amount in storage], dtype=np.float64)
        self.busy: Numbers = np.zeros(topology.world_size)
        self.local = topology.local_world_size

    def take(self, other: _Ranks) -> None:
        """Be as ``other`` is."""
        self.hbm, self.ddr, self.busy = other.hbm, other.ddr, other.busy

    def place(self, option: ShardingOption, index: int, rank: int) -> None:
        shard = option.shards[index]
        self.hbm[rank] -= shard.used.hbm
        self.ddr[rank] -= shard.used.ddr
        self.busy[rank] += shard.time.total

    def hosts(self) -> list[int]:
        """The hosts, the least busy first."""
        return sorted(
            range(len(self.busy) // self.local),
            key=lambda host: float(self.busy[host * self.local : (host + 1) * self.local].sum()),
        )

    def least_busy(self, storage: Storage, excluded: Sequence[int]) -> int | None:
        """The least busy rank that has room; the roomiest of equals."""
        fits = (self.hbm >= storage.hbm) & (self.ddr >= storage.ddr)
        if excluded:
            fits[list(excluded)] = False
        (fitting,) = fits.nonzero()
        if not fitting.size:
            return None
        busy = self.busy[fitting]
        candidates = fitting[busy == busy.min()]
        if candidates.size == 1:
            return int(candidates[0])
        room = self.hbm[candidates] + self.ddr[candidates]
        return int(candidates[int(room.argmax())])


class GreedyPerfPartitioner(Partitioner):
    """Large options first, every shard to the least busy rank that has room for it.

    Options that need every rank are placed first, then those that need a host, then single
    shards.  Column shards of one table go to different ranks.  Options of one ``dependency`` are placed
    together, on the least busy host that has room for all of them.

    Args:
        sort_by: what "large" means; of equals the one that the proposal has first.
        balance_modules: tables of modules with few tables go first, module after module, so each
            module's tables are spread evenly over the ranks by themselves.
    """

    def __init__(
        self,
        sort_by: SortBy = SortBy.STORAGE,
        balance_modules: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
    ) -> None:
        self._sort_by = sort_by
        self._balance_modules = balance_modules

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """Copies of the options whose shards have ranks, in the proposal's order.

        Raises:
            PlannerError: a shard fits nowhere; ``table``'s shard and the room are named.
        """
        ranks = _Ranks(storage_constraint)
        tables = Counter(option.path for option in proposal if self._balance_modules)
        together: dict[str | int, list[int]] = {}
        for index, option in enumerate(proposal):
            key = index if option.dependency is None else option.dependency
            together.setdefault(key, []).append(index)
        order = sorted(
            together.values(),
            key=lambda own: (
                _turn(proposal[own[0]]),
                tables[proposal[own[0]].path],
                sum(self._size(proposal[index]) for index in own),
            ),
        )
        placed: dict[int, list[int]] = {}
        for own in order:
            first = proposal[own[0]]
            if first.dependency is None:
                placed[own[0]] = _PLACEMENTS[first.place_by](first, ranks)
            else:
                own.sort(key=lambda index: _turn_on_host(proposal[index]))
                chosen = _place_together([proposal[index] for index in own], ranks)
                placed.update(zip(own, chosen, strict=True))
        return [option.placed(placed[index]) for index, option in enumerate(proposal)]

    def _size(self, option: ShardingOption) -> float:
        if self._sort_by is SortBy.PERF:
            return -option.total_perf
        storage = option.total_storage
        return -float(storage.hbm + storage.ddr)


def _no_room(option: ShardingOption, index: int) -> PlannerError:
    shard = option.shards[index]
    return PlannerError(
        f"table {option.fqn!r} ({option.sharding_type}, {option.compute_kernel}): its shard of "
        f"{shard.size[0]} x {shard.size[1]} takes {shard.used.hbm / GIB:.3f} GiB of device and "
        f"{shard.used.ddr / GIB:.3f} GiB of host memory, and no rank has that left",
        PlannerErrorType.PARTITION,
    )


def _place_uniform(option: ShardingOption, ranks: _Ranks) -> list[int]:
    if option.num_shards != len(ranks.busy):
        raise PlannerError(
            f"table {option.fqn!r} ({option.sharding_type}) has {option.num_shards} shards for "
            f"{len(ranks.busy)} ranks",
            PlannerErrorType.PARTITION,
        )
    for rank in range(option.num_shards):
        ranks.place(option, rank, rank)
    short = np.flatnonzero((ranks.hbm < 0) | (ranks.ddr < 0))
    if short.size:
        raise _no_room(option, int(short[0]))
    return list(range(option.num_shards))


def _place_shards(option: ShardingOption, ranks: _Ranks) -> list[int]:
    chosen: list[int] = []
    for index, shard in enumerate(option.shards):
        rank = ranks.least_busy(shard.used, chosen)
        if rank is None:
            raise _no_room(option, index)
        ranks.place(option, index, rank)
        chosen.append(rank)
    return chosen


def _place_on_hosts(option: ShardingOption, ranks: _Ranks) -> list[int]:
    """Groups of shards, each on the ranks of one host: the least busy one with room."""
    local = ranks.local
    one_host = option.place_by is PartitionByType.HOST
    group = option.num_shards if one_host else local
    chosen: list[int] = []
    for first in range(0, option.num_shards, group):
        indices = range(first, first + group)
        for host in ranks.hosts():
            on_host = _try_host(option, indices, ranks, host)
            if on_host is not None:
                break
        else:
            raise _no_room(option, first)
        for index, rank in zip(indices, on_host, strict=True):
            ranks.place(option, index, rank)
        chosen += on_host
    return chosen


def _try_host(
    option: ShardingOption, indices: Sequence[int], ranks: _Ranks, host: int
) -> list[int] | None:
    """Ranks of ``host`` for these shards; None if they do not fit."""
    local = ranks.local
    first = host * local
    if len(indices) == local:
        on_host = list(range(first, first + local))
    else:
        order = np.argsort(ranks.busy[first : first + local], kind="stable")[: len(indices)]
        on_host = [first + int(offset) for offset in order]
    for index, rank in zip(indices, on_host, strict=True):
        storage = option.shards[index].used
        if ranks.hbm[rank] < storage.hbm or ranks.ddr[rank] < storage.ddr:
            return None
    return on_host


def _place_together(options: Sequence[ShardingOption], ranks: _Ranks) -> list[list[int]]:
    """The ranks of each option's shards, all of one host: the least busy one with room for all."""
    for host in ranks.hosts():
        trial = copy.deepcopy(ranks)
        chosen = _all_on_host(options, trial, host)
        if chosen is not None:
            ranks.take(trial)
            return chosen
    names = ", ".join(option.fqn for option in options)
    storage = [option.total_storage for option in options]
    raise PlannerError(
        f"tables {names} must lie on one host, for {options[0].dependency!r}; they take "
        f"{sum(own.hbm for own in storage) / GIB:.3f} GiB of device and "
        f"{sum(own.ddr for own in storage) / GIB:.3f} GiB of host memory, and no host has ranks with that "
        "left",
        PlannerErrorType.PARTITION,
    )


def _all_on_host(
    options: Sequence[ShardingOption], ranks: _Ranks, host: int
) -> list[list[int]] | None:
    """Place the options on the ranks of ``host``; None: they do not fit."""
    chosen: list[list[int]] = []
    for option in options:
        by_shard = option.place_by is PartitionByType.DEVICE
        on_host = (_each_on_host if by_shard else _evenly_on_host)(option, ranks, host)
        if on_host is None:
            return None
        chosen.append(on_host)
    return chosen


def _each_on_host(option: ShardingOption, ranks: _Ranks, host: int) -> list[int] | None:
    """Place every shard on the least busy rank of ``host`` that has room for it; None: there is none."""
    own = range(host * ranks.local, (host + 1) * ranks.local)
    elsewhere = [rank for rank in range(len(ranks.busy)) if rank not in own]
    chosen: list[int] = []
    for index, shard in enumerate(option.shards):
        rank = ranks.least_busy(shard.used, [*elsewhere, *chosen])
        if rank is None:
            return None
        ranks.place(option, index, rank)
        chosen.append(rank)
    return chosen


def _evenly_on_host(option: ShardingOption, ranks: _Ranks, host: int) -> list[int] | None:
    """Place the shards on different ranks of ``host``; None: they do not fit."""
    if option.num_shards > ranks.local:
        return None
    indices = range(option.num_shards)
    chosen = _try_host(option, indices, ranks, host)
    if chosen is not None:
        for index, rank in zip(indices, chosen, strict=True):
            ranks.place(option, index, rank)
    return chosen


# In the order in which options are placed.
_PLACEMENTS: dict[PartitionByType, Callable[[ShardingOption, _Ranks], list[int]]] = {
    PartitionByType.UNIFORM: _place_uniform,
    PartitionByType.MULTI_HOST: _place_on_hosts,
    PartitionByType.HOST: _place_on_hosts,
    PartitionByType.DEVICE: _place_shards,
}


def _turn(option: ShardingOption) -> int:
    """Which options are placed first: the smaller."""
    place_by = PartitionByType.HOST if option.dependency is not None else option.place_by
    return list(_PLACEMENTS).index(place_by)


def _turn_on_host(option: ShardingOption) -> tuple[bool, int]:
    """The same on a host: those that take its ranks evenly, in their order, and then single shards, the largest first."""
    alone = option.place_by is PartitionByType.DEVICE
    storage = option.total_storage
    return alone, -(storage.hbm + storage.ddr) if alone else 0


class MemoryBalancedPartitioner(Partitioner):
    """`GreedyPerfPartitioner` with as little memory per rank as a small loss of time allows.

    The memory that a rank may use is lowered by bisection as long as the plan's rating stays
    within ``tolerance`` of the unrestricted one.

    Args:
        max_search_count: steps of the bisection.
        tolerance: how much worse the rating may become; 0.02 is 2%.
        balance_modules: see `GreedyPerfPartitioner`.
        performance_model: rates; None: `NoopPerfModel`.
    """

    def __init__(
        self,
        max_search_count: int = 10,
        tolerance: float = 0.02,
        balance_modules: bool = False,  # noqa: FBT001, FBT002 - the signature TorchRec users know
        *,
        performance_model: PerfModel | None = None,
    ) -> None:
        self._balance_modules = balance_modules
        self._steps = max_search_count
        self._tolerance = tolerance
        self._model = performance_model

    def partition(
        self, proposal: list[ShardingOption], storage_constraint: Topology
    ) -> list[ShardingOption]:
        """See `GreedyPerfPartitioner.partition`."""
        greedy = GreedyPerfPartitioner(balance_modules=self._balance_modules)
        model = self._model or NoopPerfModel(storage_constraint)
        best = greedy.partition(proposal, storage_constraint)
        limit = model.rate(best) * (1 + self._tolerance)
        device = storage_constraint.compute_device
        caps = [rank.storage for rank in storage_constraint.devices]
        low = sum(option.total_storage.on(device) for option in proposal) / len(caps)
        high = float(max(cap.on(device) for cap in caps))
        for _ in range(self._steps):
            middle = (low + high) / 2
            tighter = storage_constraint.with_storage(
                [
                    Storage(min(cap.hbm, int(middle)), cap.ddr)
                    if device == "cuda"
                    else Storage(cap.hbm, min(cap.ddr, int(middle)))
                    for cap in caps
                ]
            )
            try:
                plan = greedy.partition(proposal, tighter)
            except PlannerError:
                low = middle
                continue
            if model.rate(plan) <= limit:
                best, high = plan, middle
            else:
                low = middle
        return best
