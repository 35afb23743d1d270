"""Bytes of records in this process's memory, or on devices, that change places with those of a commit.

What is left in the commit's memory afterwards is what undoes it: `torch.ops.tessera.exchange_rows`, on GPUs
`DeviceExchange`.  Several commits are undone in one call, which writes the rows of all to one part of a table after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tessera.serving.package.pace import Pace
from tessera.serving.server.follow.device_exchange import DeviceExchange

_LARGEST_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Bytes that change places with those of one record in this process's memory.

    Attributes:
        memory: ``[bytes]`` uint8, the record's.
        rows: ``[count]`` int64 or int32, ascending.
        values: ``[count, width]`` uint8.
        offset: where row 0 begins.
        stride: bytes from one row to the next.
    """

    memory: Tensor
    rows: Tensor
    values: Tensor
    offset: int
    stride: int

    def run(self) -> None:
        """Exchange them; running it again undoes it."""
        torch.ops.tessera.exchange_rows(
            self.memory, self.rows, self.values, self.offset, self.stride
        )

    def compact(self) -> Exchange:
        """The same with rows' numbers of four bytes, as a commit's file has them, where they fit."""
        if (
            self.rows.dtype == torch.int32
            or not self.rows.numel()
            or int(self.rows[-1]) > _LARGEST_INT32
        ):
            return self
        return replace(self, rows=self.rows.int())

    @property
    def held(self) -> list[Tensor]:
        """What it holds beside the record; rows may be those of another exchange, too."""
        return [self.values, self.rows]


AnyExchange: TypeAlias = Exchange | DeviceExchange


def exchange_all(exchanges: Sequence[AnyExchange]) -> None:
    """Run all in their order, or none; those of the CPU in one call, which gives the interpreter's lock away once.

    A GPU may still be at it afterwards: what is computed there later waits for it.
    """
    host, device = _on_host(exchanges), on_devices(exchanges)
    done: list[DeviceExchange] = []
    if host:
        torch.ops.tessera.exchange_rows_of(*patch_arguments(host))
    try:
        for one in device:
            one.run()
            done.append(one)
    except BaseException:
        for one in reversed(done):
            one.run()
        if host:
            torch.ops.tessera.exchange_rows_of(*patch_arguments(host[::-1]))
        raise


def take_back_all(exchanges: Sequence[AnyExchange], threads: int) -> None:
    """Undo all that were run, given in the opposite order, or none; on the CPU on ``threads`` threads at most.

    What those of the CPU hold does not change, so they cannot be run again.
    """
    host, device = _on_host(exchanges), on_devices(exchanges)
    exchange_all(device)
    if not host:
        return
    try:
        torch.ops.tessera.restore_rows(*patch_arguments(host), threads)
    except BaseException:
        exchange_all(device[::-1])
        raise


def prepare(exchanges: Sequence[AnyExchange], pace: Pace) -> None:
    """Do beside serving what would make the first exchange take longer.

    On the CPU that are faults of pages that nobody wrote to lately, on GPUs the reading of what is replaced.

    Args:
        exchanges: those of a commit.
        pace: that of the thread.
    """
    host = _on_host(exchanges)
    if host:
        torch.ops.tessera.touch_rows_aside(*patch_arguments(host), pace.share, pace.left_s)
    for one in on_devices(exchanges):
        one.keep()
        pace.rest()


def bring_near(exchanges: Sequence[AnyExchange]) -> None:
    """Have the rows that are exchanged next in the caches, beside those who read them."""
    host = _on_host(exchanges)
    if host:
        torch.ops.tessera.touch_rows_of(*patch_arguments(host))


def _on_host(exchanges: Sequence[AnyExchange]) -> list[Exchange]:
    return [one for one in exchanges if isinstance(one, Exchange)]


def on_devices(exchanges: Sequence[AnyExchange]) -> list[DeviceExchange]:
    """The exchanges with the memory of devices."""
    return [one for one in exchanges if isinstance(one, DeviceExchange)]


def patch_arguments(exchanges: Sequence[Exchange]) -> tuple[list[Any], ...]:
    """The arguments of ``exchange_rows_of`` and ``touch_rows_of``, and the first ones of the operators that take more."""
    return (
        [one.memory for one in exchanges],
        [one.rows for one in exchanges],
        [one.values for one in exchanges],
        [one.offset for one in exchanges],
        [one.stride for one in exchanges],
    )
