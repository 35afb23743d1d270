"""How many CPUs this process may use, control groups' quotas counted.

A container is often given a share of a machine by a quota of its control group (Docker's ``--cpus``,
Kubernetes' limits) while every CPU of the machine stays in its affinity mask.  Who starts a thread
for each of them then gets all of them stopped for most of each period.  The quota of a group holds
for the groups below it, too, so the least of them counts.  Linux' Documentation/admin-guide/
cgroup-v2.rst describes ``cpu.max``, and cgroup-v1's scheduler page ``cpu.cfs_quota_us``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def usable_cpus(*, groups: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """The CPUs of the affinity mask, or the quota of a control group, rounded up, if that is less.

    Args:
        groups: where control groups are mounted.
        membership: the file that says of which groups this process is a member.

    Returns:
        At least 1.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quotas = [quota for folder in _folders(groups, membership) for quota in _quotas(folder)]
    return max(1, min(allowed, math.ceil(min(quotas, default=allowed))))


def _folders(groups: Path, membership: Path) -> Iterator[Path]:
    """The folders of this process's groups, those above them included."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's, which is not mounted here.
        root = groups / controllers if controllers else groups
        relative = PurePosixPath(path.lstrip("/"))
        yield from (root / above for above in (relative, *relative.parents))
    yield from (groups, groups / "cpu")


def _quotas(folder: Path) -> Iterator[float]:
    """The CPUs that the group of ``folder`` may use on average, if it has a quota."""
    quota = _numbers(folder / "cpu.max") or (
        _numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us")
    )
    if len(quota) == 2 and quota[0] > 0 and quota[1] > 0:
        yield quota[0] / quota[1]


def _numbers(path: Path) -> list[int]:
    """The numbers of a file; none where it is missing or says ``max``."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []
