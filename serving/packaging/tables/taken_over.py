"""Tables whose rows are stored already: a quantized collection's, whole or in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.kernels.row_types import RowType
from tessera.serving.package.manifest import Placement, ShardingPlan
from tessera.training.quant.lookup import StoredPart


@dataclass(frozen=True, kw_only=True)
class QuantizedTable:
    """A table whose rows, of type ``kind``, are packaged byte for byte.

    The blocks together hold every row and column.
    """

    name: str
    rows: int
    dim: int
    kind: RowType
    blocks: tuple[StoredPart, ...]

    def stored(self, begin: int, end: int) -> Tensor:
        """Rows ``[begin, end)`` whole, ``[end - begin, row bytes]`` uint8 on the CPU."""
        header = self.kind.header_bytes
        found = torch.zeros(end - begin, self.kind.row_bytes(self.dim), dtype=torch.uint8)
        for block in self.blocks:
            first, last = max(begin, block.row), min(end, block.row + len(block.rows))
            if first >= last:
                continue
            own = block.rows[first - block.row : last - block.row].cpu()
            at = header + self.kind.data_bytes(block.column)
            width = self.kind.data_bytes(block.columns)
            here = found[first - begin : last - begin]
            here[:, :header] = own[:, :header]
            here[:, at : at + width] = own[:, header : header + width]
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
        Placement.of(
            table.name,
            devices.index(block.device),
            "cpu",
            (block.row, block.row + len(block.rows)),
            (block.column, block.column + block.columns),
        )
        for table in tables
        for block in table.blocks
    ]
    return ShardingPlan(num_shards=len(devices), placements=(*placements, *others))
