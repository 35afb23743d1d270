"""Which ways of the tables are tried together."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tessera.training.distributed.planner.types import (
    Enumerator,
    Proposer,
    ShardingOption,
    Topology,
)


def options_by_table(search_space: list[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of every table, by its full name, fastest first."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in search_space:
        tables.setdefault(option.fqn, []).append(option)
    return {fqn: sorted(options, key=_cost) for fqn, options in tables.items()}


def _cost(option: ShardingOption) -> float:
    """A table's share of every rank's step, were it spread evenly, or of its busiest rank's.

    Both matter: the sum is what all ranks must do, the largest shard cannot be balanced away.
    """
    largest = max(shard.perf.total for shard in option.shards if shard.perf is not None)
    return option.total_perf + largest


def _bytes(option: ShardingOption) -> int:
    storage = option.total_storage
    return storage.hbm or storage.ddr


class GreedyProposer(Proposer):
    """Starts with the fastest way of every table and gives up speed for memory step by step.

    While a proposal does not fit, the table that frees most bytes per millisecond lost takes its
    next smaller way; once one fits, the table that loses least takes its next way.

    Args:
        threshold: proposals that fit and are not better than the best before giving up.
    """

    def __init__(self, threshold: int = 64) -> None:
        self._threshold = threshold
        self._tables: list[list[ShardingOption]] = []

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Begin a search among these options."""
        del enumerator
        self._tables = list(options_by_table(search_space).values())
        self._now = [0] * len(self._tables)
        self._best = math.inf
        self._misses = 0
        self._done = not self._tables
        self._costs = [[_cost(option) for option in table] for table in self._tables]
        self._sizes = [[_bytes(option) for option in table] for table in self._tables]
        self._total = sum(sizes[0] for sizes in self._sizes)
        self._smaller: list[tuple[float, int, int, int]] = []
        self._slower: list[tuple[float, int, int, int]] = []
        for table in range(len(self._tables)):
            self._push(table)

    def _push(self, table: int) -> None:
        """Queue the next steps of a table from where it is."""
        now = self._now[table]
        costs, sizes = self._costs[table], self._sizes[table]
        if now + 1 < len(costs):
            entry = (costs[now + 1] - costs[now], table, now, now + 1)
            heapq.heappush(self._slower, entry)
        for after in range(now + 1, len(costs)):
            freed = sizes[now] - sizes[after]
            if freed > 0:
                lost = max(costs[after] - costs[now], 1e-12)
                heapq.heappush(self._smaller, (-freed / lost, table, now, after))

    def _advance(self, queue: list[tuple[float, int, int, int]]) -> bool:
        while queue:
            _, table, before, after = heapq.heappop(queue)
            if self._now[table] == before:
                self._now[table] = after
                self._total += self._sizes[table][after] - self._sizes[table][before]
                self._push(table)
                return True
        return False

    def propose(self) -> list[ShardingOption] | None:
        """One option per table; None: nothing more to try."""
        if self._done:
            return None
        return [table[now] for table, now in zip(self._tables, self._now, strict=True)]

    def feedback(
        self,
        partitionable: bool,  # noqa: FBT001 - the signature TorchRec users know
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Take one step, or, where far too much memory was asked for, many."""
        del plan
        if partitionable:
            assert perf_rating is not None
            self._misses = 0 if perf_rating < self._best else self._misses + 1
            self._best = min(self._best, perf_rating)
            self._done = self._misses >= self._threshold or not self._advance(self._slower)
            return
        self._done = not self._advance(self._smaller)
        if storage_constraint is None:
            return
        room = sum(d.storage.hbm or d.storage.ddr for d in storage_constraint.devices)
        while not self._done and self._total > room:
            self._done = not self._advance(self._smaller)


class _ListProposer(Proposer):
    """Proposes what a generator yields, whether or not the last proposal fitted."""

    def __init__(self) -> None:
        self._proposals: Iterator[list[ShardingOption]] = iter(())
        self._current: list[ShardingOption] | None = None

    def load(
        self, search_space: list[ShardingOption], enumerator: Enumerator | None = None
    ) -> None:
        """Begin a search among these options."""
        del enumerator
        self._proposals = self._list(options_by_table(search_space))
        self._current = next(self._proposals, None)

    @abstractmethod
    def _list(self, tables: dict[str, list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        """What is proposed, of the options by table."""

    def propose(self) -> list[ShardingOption] | None:
        """One option per table; None: nothing more to try."""
        return self._current

    def feedback(
        self,
        partitionable: bool,  # noqa: FBT001 - the signature TorchRec users know
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Go on to the next proposal."""
        del partitionable, plan, perf_rating, storage_constraint
        self._current = next(self._proposals, None)


class UniformProposer(_ListProposer):
    """One strategy for all tables, one after the other: the fastest kernels, then the smallest.

    A table that does not have the type takes its own fastest way.
    """

    def _list(self, tables: dict[str, list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        kinds = dict.fromkeys(o.sharding_type for options in tables.values() for o in options)
        for kind in kinds:
            ways_by_table = [
                [option for option in options if option.sharding_type == kind] or options[:1]
                for options in tables.values()
            ]
            yield [ways[0] for ways in ways_by_table]
            yield [min(ways, key=_bytes) for ways in ways_by_table]


class GridSearchProposer(_ListProposer):
    """Every combination, if there are not too many.

    Args:
        max_proposals: more combinations than this: none is proposed.
    """

    def __init__(self, max_proposals: int = 2000) -> None:
        super().__init__()
        self._max = max_proposals

    def _list(self, tables: dict[str, list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        combinations = math.prod(len(options) for options in tables.values())
        if tables and combinations <= self._max:
            for choice in itertools.product(*tables.values()):
                yield list(choice)


class DynamicProgrammingProposer(_ListProposer):
    """The least total time for each amount of total memory, by dynamic programming.

    Memory is counted in bins, so a proposal may take up to one bin per table more than its bin
    says; the partitioner has the last word.  Starts with the smallest way of every table, which
    tells how much memory there is, then goes from all of it downwards.

    Args:
        bins: into which the ranks' memory is divided.
        fractions: of the memory, what the proposals may use.
    """

    def __init__(
        self,
        bins: int = 1000,
        fractions: tuple[float, ...] = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1),
    ) -> None:
        super().__init__()
        self._bins = bins
        self._fractions = fractions
        self._topology: Topology | None = None

    def _list(self, tables: dict[str, list[ShardingOption]]) -> Iterator[list[ShardingOption]]:
        if tables:
            yield [min(options, key=_bytes) for options in tables.values()]
            # By now `feedback` has told how much memory there is.
            if self._topology is not None:
                yield from self._solve(list(tables.values()), self._topology)

    def feedback(
        self,
        partitionable: bool,  # noqa: FBT001 - the signature TorchRec users know
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """Solve after the first proposal, and go on to the next solution."""
        self._topology = storage_constraint
        super().feedback(partitionable, plan, perf_rating, storage_constraint)

    def _solve(
        self, tables: list[list[ShardingOption]], topology: Topology
    ) -> list[list[ShardingOption]]:
        room = sum(d.storage.hbm or d.storage.ddr for d in topology.devices)
        if room <= 0:
            return []
        bin_bytes = room / self._bins
        best = np.zeros(self._bins + 1)
        choices: list[npt.NDArray[np.int16]] = []
        widths: list[list[int]] = []
        for options in tables:
            sizes = [round(_bytes(option) / bin_bytes) for option in options]
            after = np.full(self._bins + 1, np.inf)
            choice = np.full(self._bins + 1, -1, dtype=np.int16)
            for index, (option, size) in enumerate(zip(options, sizes, strict=True)):
                if size > self._bins:
                    continue
                cost = np.full(self._bins + 1, np.inf)
                cost[size:] = best[: self._bins + 1 - size] + _cost(option)
                better = cost < after
                after[better] = cost[better]
                choice[better] = index
            best = after
            choices.append(choice)
            widths.append(sizes)
        found: list[list[ShardingOption]] = []
        for fraction in self._fractions:
            proposal = _walk_back(int(self._bins * fraction), tables, choices, widths)
            if proposal is not None and proposal not in found:
                found.append(proposal)
        return found


def _walk_back(
    left: int,
    tables: list[list[ShardingOption]],
    choices: list[npt.NDArray[np.int16]],
    widths: list[list[int]],
) -> list[ShardingOption] | None:
    picked = []
    for options, choice, sizes in zip(
        reversed(tables), reversed(choices), reversed(widths), strict=True
    ):
        index = int(choice[left])
        if index < 0:
            return None
        picked.append(options[index])
        left -= sizes[index]
    return picked[::-1]
