"""Tables whose rows are stored already: a quantized collection's, whole or in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.kernels.row_types import RowType
from tessera.serving.package.manifest import Placement, ShardingPlan


@dataclass(frozen=True, kw_only=True)
class StoredBlock:
    """Some rows and columns of a table as they lie on one device.

    Attributes:
        device: the device's number, from 0 on.
        row_begin, row_end, column_begin, column_end: which part of the table.
        rows: ``[row_end - row_begin, at least row bytes]`` uint8: scale and bias of the whole row
            first, then the numbers of the block's columns.
    """

    device: int
    row_begin: int
    row_end: int
    column_begin: int
    column_end: int
    rows: Tensor


@dataclass(frozen=True, kw_only=True)
class QuantizedTable:
    """A table whose rows are packaged byte for byte.

    Attributes:
        name: the table's.
        rows: how many.
        dim: columns.
        kind: what its rows are.
        blocks: where they are; together they hold every row and column.
    """

    name: str
    rows: int
    dim: int
    kind: RowType
    blocks: tuple[StoredBlock, ...]

    def stored(self, begin: int, end: int) -> Tensor:
        """Rows ``[begin, end)`` whole, ``[end - begin, row bytes]`` uint8 on the CPU."""
        header = self.kind.header_bytes
        found = torch.zeros(end - begin, self.kind.row_bytes(self.dim), dtype=torch.uint8)
        for block in self.blocks:
            first, last = max(begin, block.row_begin), min(end, block.row_end)
            if first >= last:
                continue
            own = block.rows[first - block.row_begin : last - block.row_begin].cpu()
            at, to = (self.kind.data_bytes(c) for c in (block.column_begin, block.column_end))
            here = found[first - begin : last - begin]
            here[:, :header] = own[:, :header]
            here[:, header + at : header + to] = own[:, header : header + to - at]
        return found


def plan_of_blocks(
    tables: Sequence[QuantizedTable], others: Sequence[Placement]
) -> ShardingPlan | None:
    """The plan that the tables' devices make, with ``others`` beside; None where all have one.

    Devices without a block are left out: shard ``k`` is the ``k``-th device that has one.
    """
    devices = sorted({block.device for table in tables for block in table.blocks})
    if len(devices) <= 1:
        return None
    placements = [
        Placement(
            table=table.name,
            shard=devices.index(block.device),
            device="cpu",
            row_begin=block.row_begin,
            row_end=block.row_end,
            column_begin=block.column_begin,
            column_end=block.column_end,
        )
        for table in tables
        for block in table.blocks
    ]
    return ShardingPlan(num_shards=len(devices), placements=(*placements, *others))
