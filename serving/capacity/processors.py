"""The CPUs of a simulated host, which threads of two weights share as the kernel's scheduler shares them.

While there are no more threads than CPUs each has one.  Otherwise they have shares in the proportion of their
weights, none more than one CPU.  Threads of one weight have equal shares at every moment, so that a clock per
weight, which advances by what such a thread is given, orders the ends of their work.
"""

from __future__ import annotations

import heapq
import math
from typing import Generic, TypeVar

Thread = TypeVar("Thread")

# The kernel's weights of nice levels 0 and 5: sched_prio_to_weight in Linux' kernel/sched/core.c.
WEIGHTS = (1024.0, 335.0)


class Processors(Generic[Thread]):
    """``cores`` CPUs; a thread runs from `start` until `finish` returns it.

    Attributes:
        now_s: the clock, to which `advance` has come.
        used_s: CPU time that was given.
    """

    def __init__(self, cores: int) -> None:
        self.now_s = 0.0
        self.used_s = 0.0
        self._cores = cores
        self._given = [0.0, 0.0]
        self._rates = [1.0, 1.0]
        self._ends: tuple[list[tuple[float, int, Thread]], list[tuple[float, int, Thread]]]
        self._ends = ([], [])
        self._number = 0

    @property
    def idle(self) -> bool:
        """Whether a CPU has nothing to do."""
        return sum(map(len, self._ends)) < self._cores

    def start(self, thread: Thread, work_s: float, kind: int) -> None:
        """Let ``thread``, of weight ``WEIGHTS[kind]``, use a CPU for ``work_s`` seconds."""
        self._number += 1
        heapq.heappush(self._ends[kind], (self._given[kind] + work_s, self._number, thread))
        self._share()

    def next_end_s(self) -> float:
        """When the next thread has done its work if no other one starts; infinite if none runs."""
        soonest = math.inf
        for kind, ends in enumerate(self._ends):
            if ends:
                left = max(ends[0][0] - self._given[kind], 0.0)
                soonest = min(soonest, self.now_s + left / self._rates[kind])
        return soonest

    def advance(self, to_s: float) -> None:
        """Let time pass until ``to_s``, which is not after `next_end_s`."""
        passed = to_s - self.now_s
        for kind, ends in enumerate(self._ends):
            self._given[kind] += passed * self._rates[kind]
            self.used_s += passed * self._rates[kind] * len(ends)
        self.now_s = to_s

    def finish(self) -> Thread:
        """Take away the thread whose work ends now, at `next_end_s`."""
        left = [
            (ends[0][0] - self._given[kind]) / self._rates[kind] if ends else math.inf
            for kind, ends in enumerate(self._ends)
        ]
        kind = left.index(min(left))
        _, _, thread = heapq.heappop(self._ends[kind])
        self._share()
        return thread

    def _share(self) -> None:
        heavy, light = map(len, self._ends)
        if heavy + light <= self._cores:
            self._rates = [1.0, 1.0]
            return
        unit = self._cores / (heavy * WEIGHTS[0] + light * WEIGHTS[1])
        rate = WEIGHTS[0] * unit
        if rate > 1 and light:
            self._rates = [1.0, min((self._cores - heavy) / light, 1.0)]
        else:
            self._rates = [min(rate, 1.0), min(WEIGHTS[1] * unit, 1.0)]
