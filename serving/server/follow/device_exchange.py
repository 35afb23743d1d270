"""Rows of a record on a GPU that change places with a commit's: copied there beside serving, then written by torch's operators.

What a commit replaces is copied on the device while the commit is staged, so that batches wait for no more than the
writing of the new rows, and for one synchronization of all of them.  Rows are moved as the widest whole numbers that
they consist of: torch moves rows number by number, so bytes would take eight times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.serving.package.pace import Pace

_UNITS = (torch.int64, torch.int32, torch.int16)
_PIECE_BYTES = 1 << 20
_LARGEST_INT32 = torch.iinfo(torch.int32).max


@dataclass(kw_only=True, eq=False)
class DeviceExchange:
    """Rows that change places with those of one record on a device.

    Attributes:
        table: ``[rows of the record up to the last one, units]``, a view of the record.
        rows: ``[count]`` int64 or int32, ascending, on the same device; None: all of ``table``.
        values: ``[count, units]``, on the same device.
        kept: the same of what ``values`` replaces, while that is known; `keep` reads it.
        wide_rows: ``rows`` as torch takes them, while they are known.
    """

    table: Tensor
    rows: Tensor | None
    values: Tensor
    kept: Tensor | None = None
    wide_rows: Tensor | None = None

    @classmethod
    def of(
        cls,
        memory: Tensor,
        rows: Tensor | None,
        values: Tensor,
        *,
        last_row: int,
        offset: int,
        stride: int,
    ) -> DeviceExchange:
        """Rows of ``memory`` ``[bytes]`` uint8, which lie ``stride`` bytes apart from ``offset`` on.

        Args:
            memory: the record's.
            rows: see above, on the memory's device.
            values: ``[count, width]`` uint8, likewise.
            last_row: the last of ``rows``.
            offset: where row 0 begins.
            stride: bytes from one row to the next.
        """
        width = values.shape[1]
        unit = _unit_of(offset, stride, width)
        size = unit.itemsize
        table = (
            memory[: len(memory) // size * size]
            .view(unit)
            .as_strided((last_row + 1, width // size), (stride // size, 1), offset // size)
        )
        return cls(table=table, rows=rows, values=values.view(unit))

    def keep(self) -> None:
        """Read what `run` will replace, beside those who read it."""
        if self.rows is None:
            self.kept = self.table.clone()
        else:
            self.wide_rows = self.rows.long()
            self.kept = self.table.index_select(0, self.wide_rows)

    def run(self) -> None:
        """Exchange them; running it again undoes it.  The device may still be at it when this returns."""
        if self.kept is None:
            self.keep()
        assert self.kept is not None
        if self.wide_rows is None:
            self.table.copy_(self.values)
        else:
            self.table.index_copy_(0, self.wide_rows, self.values)
        self.values, self.kept = self.kept, self.values

    def compact(self) -> DeviceExchange:
        """Hold no more than what undoes it; returns itself."""
        self.kept = self.wide_rows = None
        return self

    @property
    def held(self) -> list[Tensor]:
        """What is left of it once it is compact; rows may be those of another exchange, too."""
        return [self.values] if self.rows is None else [self.values, self.rows]


def rows_on_device(rows: Tensor, device: torch.device, pace: Pace) -> Tensor:
    """A patch's rows ``[count]``, ascending, on ``device``, as int32 where they fit."""
    return copied(rows.int() if int(rows[-1]) <= _LARGEST_INT32 else rows, device, pace)


def copied(values: Tensor, device: torch.device, pace: Pace) -> Tensor:
    """A contiguous tensor's copy on ``device``, made in pieces: a GPU takes copies one after the other, those of batches as well."""
    there = torch.empty_like(values, device=device)
    source, target = (one.view(-1).view(torch.uint8) for one in (values, there))
    for at in range(0, len(source), _PIECE_BYTES):
        target[at : at + _PIECE_BYTES].copy_(source[at : at + _PIECE_BYTES])
        pace.rest()
    return there


def _unit_of(*sizes: int) -> torch.dtype:
    """The widest type of whole numbers of which all of the ``sizes`` in bytes are multiples."""
    for unit in _UNITS:
        if all(size % unit.itemsize == 0 for size in sizes):
            return unit
    return torch.uint8
