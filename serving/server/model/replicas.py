"""The same model on several devices."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

from tessera.serving.package.runner import HostBatch, Runner


class Replicas:
    """The same model on several devices; calls take turns in them.

    Args:
        runners: one per replica.
    """

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = runners
        self._turns = itertools.cycle(range(len(runners)))
        self._lock = threading.Lock()
        self._in_work = [0] * len(runners)
        self._shares_rows = all(runner.shares_rows for runner in runners)

    @property
    def shares_rows(self) -> bool:
        """Whether every replica takes batches whose samples share rows."""
        return self._shares_rows

    def forward(self, batch: HostBatch) -> dict[str, Tensor]:
        """The scores of ``batch`` from the replica whose turn it is."""
        replica = next(self._turns)
        self._count(replica, +1)
        try:
            return self._runners[replica].forward(batch)
        finally:
            self._count(replica, -1)

    def in_work(self, replica: int) -> int:
        """Batches that this replica computes now."""
        return self._in_work[replica]

    def _count(self, replica: int, change: int) -> None:
        with self._lock:
            self._in_work[replica] += change


def devices_of_replicas(devices: Sequence[str], shards: int) -> Iterator[list[str]]:
    """For each replica of a model of so many shards, the device of each shard.

    As many replicas as there are devices for; where there are too few for one, its shards take turns.
    """
    if not devices:
        return
    if len(devices) < shards:
        yield [devices[shard % len(devices)] for shard in range(shards)]
    for begin in range(0, len(devices) - shards + 1, shards):
        yield list(devices[begin : begin + shards])
