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

    # Each event of a simulation comes here four times, so that slots and the repeated lines below are worth it.
    __slots__ = (
        "_cores",
        "_heavy",
        "_heavy_given",
        "_heavy_rate",
        "_light",
        "_light_given",
        "_light_rate",
        "_number",
        "_running",
        "now_s",
        "used_s",
    )

    def __init__(self, cores: int) -> None:
        self.now_s = 0.0
        self.used_s = 0.0
        self._cores = cores
        # Of each weight: the clock that its threads are given, its rate, and the ends of their work by it.
        self._heavy_given = self._light_given = 0.0
        self._heavy_rate = self._light_rate = 1.0
        self._heavy: list[tuple[float, int, Thread]] = []
        self._light: list[tuple[float, int, Thread]] = []
        self._number = 0
        self._running = 0

    @property
    def idle(self) -> bool:
        """Whether a CPU has nothing to do."""
        return self._running < self._cores

    def start(self, thread: Thread, work_s: float, kind: int) -> None:
        """Let ``thread``, of weight ``WEIGHTS[kind]``, use a CPU for ``work_s`` seconds."""
        self._number += 1
        if kind:
            heapq.heappush(self._light, (self._light_given + work_s, self._number, thread))
        else:
            heapq.heappush(self._heavy, (self._heavy_given + work_s, self._number, thread))
        self._running += 1
        if self._running > self._cores:
            self._share()

    def next_end_s(self) -> float:
        """When the next thread has done its work if no other one starts; infinite if none runs."""
        left_s = math.inf
        if self._heavy:
            left_s = (self._heavy[0][0] - self._heavy_given) / self._heavy_rate
        if self._light:
            light_left_s = (self._light[0][0] - self._light_given) / self._light_rate
            left_s = min(left_s, light_left_s)
        return self.now_s + left_s if left_s > 0 else self.now_s

    def advance(self, to_s: float) -> None:
        """Let time pass until ``to_s``, which is not after `next_end_s`."""
        passed = to_s - self.now_s
        heavy_s, light_s = passed * self._heavy_rate, passed * self._light_rate
        self._heavy_given += heavy_s
        self._light_given += light_s
        self.used_s += heavy_s * len(self._heavy) + light_s * len(self._light)
        self.now_s = to_s

    def finish(self) -> Thread:
        """Take away the thread whose work ends now, at `next_end_s`."""
        ends = self._heavy
        if self._light:
            light_left_s = (self._light[0][0] - self._light_given) / self._light_rate
            if not ends or light_left_s < (ends[0][0] - self._heavy_given) / self._heavy_rate:
                ends = self._light
        thread = heapq.heappop(ends)[2]
        self._running -= 1
        if self._running >= self._cores:
            self._share()
        return thread

    def _share(self) -> None:
        heavy, light = len(self._heavy), len(self._light)
        if heavy + light <= self._cores:
            self._heavy_rate = self._light_rate = 1.0
            return
        unit = self._cores / (heavy * WEIGHTS[0] + light * WEIGHTS[1])
        rate = WEIGHTS[0] * unit
        if rate > 1 and light:
            self._heavy_rate, self._light_rate = 1.0, min((self._cores - heavy) / light, 1.0)
        else:
            self._heavy_rate, self._light_rate = min(rate, 1.0), min(WEIGHTS[1] * unit, 1.0)
