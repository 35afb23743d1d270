"""Bandwidths of this machine, for a `Topology` that describes it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

_ROWS, _COLUMNS = 1 << 20, 64
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Bytes per second, under the names that `Topology` takes.

    ``mem_bw`` is that of gathering random rows of 256 bytes, as lookups do, ``intra_host_bw`` that of
    an all-to-all among the ranks of the group; None without a group.
    """

    mem_bw: float
    intra_host_bw: float | None


def _median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    times = []
    for _ in range(_REPEATS):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_bandwidths(device: torch.device, pg: Any = None) -> Bandwidths:
    """Measure for half a second or so; call it on every rank of ``pg`` at once.

    Args:
        device: where tables will lie.
        pg: the group; None: the default one, if there is one.

    Memory: 512 MiB while it runs, on a GPU 1.5 GiB.
    """
    table = torch.rand(_ROWS, _COLUMNS, device=device)
    # A GPU gets enough to do that starting it does not count.
    count = 4 * _ROWS if device.type == "cuda" else _ROWS // 4
    ids = torch.randint(_ROWS, (count,), device=device)
    # Into memory that is there: on a CPU a large result's own pages take three times as long as the rows.
    found = torch.empty(count, _COLUMNS, device=device)
    seconds = _median_seconds(lambda: torch.index_select(table, 0, ids, out=found), device)
    row_bytes = ids.numel() * _COLUMNS * table.element_size()
    if pg is None and dist.is_available() and dist.is_initialized():
        pg = dist.group.WORLD
    between = None
    if pg is not None and dist.get_world_size(pg) > 1:
        ranks = dist.get_world_size(pg)
        sent = table[: _ROWS // ranks * ranks].view(-1)
        received = torch.empty_like(sent)
        taken = _median_seconds(lambda: dist.all_to_all_single(received, sent, group=pg), device)
        between = sent.numel() * sent.element_size() * (ranks - 1) / ranks / taken
    # A gathered row is read once and written once.
    return Bandwidths(mem_bw=2 * row_bytes / seconds, intra_host_bw=between)
