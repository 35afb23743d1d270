"""Which ways of the tables are tried together."""

# ruff: noqa: PLC0414 - a name that is imported as itself is for those who import it from here

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import numpy.typing as npt

from tessera.training.distributed.planner.scaleup import (
    EmbeddingOffloadScaleupProposer as EmbeddingOffloadScaleupProposer,
)
from tessera.training.distributed.planner.search import Proposals, Search, size_of, time_of
from tessera.training.distributed.planner.types import ShardingOption


class GreedyProposer(Search):
    """Starts with the fastest way of every table and gives up speed for memory step by step.

    While a proposal does not fit, the table that frees most bytes per millisecond lost takes its
    next smaller way; once one fits, the table that loses least takes its next way.

    Args:
        threshold: proposals that fit and are not better than the best before giving up.
    """

    def __init__(self, threshold: int = 64) -> None:
        self._threshold = threshold

    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        descent = _Descent(list(tables.values()))
        best, misses, going = math.inf, 0, bool(tables)
        while going:
            outcome = yield descent.proposal
            if outcome.rating is not None:
                misses = 0 if outcome.rating < best else misses + 1
                best = min(best, outcome.rating)
                going = misses < self._threshold and descent.advance(descent.slower)
                continue
            going = descent.advance(descent.smaller)
            # Where far too much memory was asked for, many steps at once.
            while going and outcome.room is not None and descent.total > outcome.room:
                going = descent.advance(descent.smaller)


Steps = list[tuple[float, int, int, int]]


class _Descent:
    """Where a greedy search is: a way per table, and the next steps in the order of their worth."""

    def __init__(self, tables: list[list[ShardingOption]]) -> None:
        self._tables = tables
        self._now = [0] * len(tables)
        self._costs = [[time_of(option) for option in table] for table in tables]
        self._sizes = [[size_of(option) for option in table] for table in tables]
        self.total = sum(sizes[0] for sizes in self._sizes)
        self.smaller: Steps = []
        self.slower: Steps = []
        for table in range(len(tables)):
            self._push(table)

    @property
    def proposal(self) -> list[ShardingOption]:
        return [table[now] for table, now in zip(self._tables, self._now, strict=True)]

    def _push(self, table: int) -> None:
        """Queue the next steps of a table from where it is."""
        now = self._now[table]
        costs, sizes = self._costs[table], self._sizes[table]
        if now + 1 < len(costs):
            heapq.heappush(self.slower, (costs[now + 1] - costs[now], table, now, now + 1))
        for after in range(now + 1, len(costs)):
            freed = sizes[now] - sizes[after]
            if freed > 0:
                lost = max(costs[after] - costs[now], 1e-12)
                heapq.heappush(self.smaller, (-freed / lost, table, now, after))

    def advance(self, queue: Steps) -> bool:
        """Take the first step of a queue that still holds; False: there is none."""
        while queue:
            _, table, before, after = heapq.heappop(queue)
            if self._now[table] == before:
                self._now[table] = after
                self.total += self._sizes[table][after] - self._sizes[table][before]
                self._push(table)
                return True
        return False


class UniformProposer(Search):
    """One strategy for all tables, one after the other: the fastest kernels, then the smallest.

    A table that does not have the type takes its own fastest way.
    """

    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        kinds = dict.fromkeys(o.sharding_type for options in tables.values() for o in options)
        for kind in kinds:
            ways_by_table = [
                [option for option in options if option.sharding_type == kind] or options[:1]
                for options in tables.values()
            ]
            yield [ways[0] for ways in ways_by_table]
            yield [min(ways, key=size_of) for ways in ways_by_table]


class GridSearchProposer(Search):
    """Every combination, if there are not too many.

    Args:
        max_proposals: more combinations than this: none is proposed.
    """

    def __init__(self, max_proposals: int = 2000) -> None:
        self._max = max_proposals

    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        combinations = math.prod(len(options) for options in tables.values())
        if tables and combinations <= self._max:
            for choice in itertools.product(*tables.values()):
                yield list(choice)


class DynamicProgrammingProposer(Search):
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
        self._bins = bins
        self._fractions = fractions

    def _search(self, tables: dict[str, list[ShardingOption]]) -> Proposals:
        if tables:
            outcome = yield [min(options, key=size_of) for options in tables.values()]
            if outcome.room:
                yield from self._solve(list(tables.values()), outcome.room)

    def _solve(self, tables: list[list[ShardingOption]], room: int) -> Proposals:
        bin_bytes = room / self._bins
        best = np.zeros(self._bins + 1)
        choices: list[npt.NDArray[np.int16]] = []
        widths: list[list[int]] = []
        for options in tables:
            sizes = [round(size_of(option) / bin_bytes) for option in options]
            after = np.full(self._bins + 1, np.inf)
            choice = np.full(self._bins + 1, -1, dtype=np.int16)
            for index, (option, size) in enumerate(zip(options, sizes, strict=True)):
                if size > self._bins:
                    continue
                cost = np.full(self._bins + 1, np.inf)
                cost[size:] = best[: self._bins + 1 - size] + time_of(option)
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
                yield proposal


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
