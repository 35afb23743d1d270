"""How much of a virtual machine's CPUs its host gave to others while something was measured.

Linux counts it (``steal`` in ``/proc/stat``): time in which a CPU had work and did not run.  Latencies of such moments tell of
the host, and not of what is measured.
"""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_STEAL = 7
_COLUMNS = 8
"""The columns after these repeat parts of the first two."""


class Stolen:
    """Counts from when it is made.

    Args:
        stat: the kernel's counters.
    """

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        self._begin = self._count()

    def _count(self) -> tuple[int, int]:
        stolen = total = 0
        for line in self._stat.read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in self._cpus:
                ticks = [int(column) for column in columns[:_COLUMNS]]
                stolen, total = stolen + ticks[_STEAL], total + sum(ticks)
        return stolen, total

    def share(self) -> float:
        """The part of the time of this process's CPUs that was stolen; 0 to 1."""
        (stolen, total), (stolen_before, total_before) = self._count(), self._begin
        return (stolen - stolen_before) / max(1, total - total_before)
