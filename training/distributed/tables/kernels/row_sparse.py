"""Tables that update the rows of a batch in its backward pass, by plain tensor operations.

For what FBGEMM's operators do not do: most optimizers on a CPU, Lion, rows whose length is not a
multiple of four, weight decay of SGD and Adagrad.  How rows are looked up and their gradients
found is `tessera.training.distributed.tables.kernels.row_blocks`'s.

Legend: D columns, U distinct rows of a batch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.interfaces import FusedTables, TableGroup
from tessera.training.distributed.tables.kernels.row_blocks import BlockLookup, RowBlocks
from tessera.training.optim.fused import FusedParams
from tessera.training.optim.row_updates import RULES, HyperParameters

CPU_BLOCK_BYTES = 1 << 18
"""Bytes of rows that are updated at a time on a CPU: few enough to stay in a core's own cache, as a
rule goes over them several times."""


class RowSparseTables(FusedTables):
    """Tables with one of the optimizers of `tessera.training.optim.row_updates`; float32.

    Memory: the tables and the states, and while a batch is updated its U rows of both.
    """

    def __init__(self, group: TableGroup, params: FusedParams) -> None:
        self._group, self._clip_to = group, params.clip_to
        self._rule = RULES[params.optimizer]
        self.step = torch.zeros((), dtype=torch.int64)
        self._hook = nn.Parameter(torch.zeros(0, device=group.device))
        self._by_cols = RowBlocks(group)
        # Per block the weights, then the states.
        self._memory = [
            [
                torch.zeros(rows if rowwise else (rows, block.cols), device=group.device)
                for rowwise in (False, *self._rule.rowwise_states)
            ]
            for block in self._by_cols.blocks
            for rows in [sum(block.rows)]
        ]
        self.weights, *states = (
            self._by_cols.per_table(tensors) for tensors in zip(*self._memory, strict=True)
        )
        self.states = [[state[place] for state in states] for place in range(len(group.tables))]

    def look_up(self, bags: Bags, hyper: HyperParameters) -> Tensor:
        """See `FusedTables`; ids must be rows.  The result is float32."""
        counted: list[int] = []

        def run(number: int, own: Bags) -> Tensor:
            memory = self._memory[number]
            update = partial(self._update, memory, hyper, counted)
            return BlockLookup(memory[0], self._group, update, self._clip_to).run(self._hook, own)

        return self._by_cols.look_up(bags, run)

    @torch.no_grad()
    def _update(
        self,
        memory: list[Tensor],
        hyper: HyperParameters,
        counted: list[int],
        rows_U: Tensor,
        gradient_UD: Tensor,
    ) -> None:
        """Update the rows of one block.

        ``counted`` holds the number of the lookup's step once one of its blocks has counted it.  A
        step without ids here is a step: the shards of a table count alike on all ranks.
        """
        if not counted:
            self.step += 1
            counted.append(int(self.step))
        if not rows_U.numel():
            return
        # .data: autograd would take a change that it sees for an error of the caller's.
        tensors = [tensor.data for tensor in memory]
        on_cpu = rows_U.device.type == "cpu"
        some = max(CPU_BLOCK_BYTES // (4 * tensors[0].size(1)), 1) if on_cpu else rows_U.numel()
        for rows, gradient in zip(
            torch.split(rows_U, some), torch.split(gradient_UD, some), strict=True
        ):
            w, *states = (tensor.index_select(0, rows) for tensor in tensors)
            self._rule.update(w, gradient, states, hyper, counted[0])
            for tensor, part in zip(tensors, (w, *states), strict=True):
                tensor.index_copy_(0, rows, part)
