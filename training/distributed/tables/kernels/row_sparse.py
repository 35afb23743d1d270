"""Tables that update the rows of a batch in its backward pass, by plain tensor operations.

For what FBGEMM's operators do not do: most optimizers on a CPU, Lion, rows whose length is not a
multiple of four, weight decay of SGD and Adagrad.  How rows are looked up and their gradients
found is `tessera.training.distributed.tables.kernels.row_blocks`'s.

Legend: T tables, N ids, D columns, U distinct rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tessera.training.distributed.tables.kernels.row_blocks import (
    BlockBags,
    RowBlock,
    RowBlocks,
    TableShape,
    look_up_rows,
    row_gradients,
)
from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters

CPU_BLOCK_BYTES = 1 << 18
"""Bytes of rows that are updated at a time on a CPU: few enough to stay in a core's own cache, as a
rule goes over them several times."""


@dataclass
class _Step:
    """One update of all tables, shared by the backward passes of their blocks."""

    number: int | None = None


@dataclass(frozen=True)
class _Plan:
    """Describes what the backward pass of a lookup does."""

    block: _Block
    hyper: HyperParameters
    step: _Step
    clip_to: float | None
    pooled: bool
    mean: bool


class _Block:
    """Holds the memory of the tables of one row length."""

    def __init__(self, owner: RowSparseTables, shape: RowBlock, device: torch.device) -> None:
        self.owner = owner
        self.shape = shape
        rows = sum(shape.rows)
        self.weight = torch.zeros(rows, shape.cols, device=device)
        self.states = [
            torch.zeros(rows if rowwise else (rows, shape.cols), device=device)
            for rowwise in owner.rule.rowwise_states
        ]

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(torch.split(tensor, self.shape.rows))

    def count_step(self, plan: _Plan) -> int:
        """The number of the lookup's step; the first block that is asked counts it."""
        if plan.step.number is None:
            plan.step.number = self.owner.next_step()
        return plan.step.number

    @torch.no_grad()
    def update(self, plan: _Plan, rows_U: Tensor, gradient_UD: Tensor) -> None:
        number = self.count_step(plan)
        # .data: autograd would take a change that it sees for an error of the caller's.
        tensors = [self.weight.data, *self.states]
        some = max(CPU_BLOCK_BYTES // (4 * self.shape.cols), 1)
        on_cpu = rows_U.device.type == "cpu"
        for rows, gradient in zip(
            rows_U.split(some) if on_cpu else [rows_U],  # type: ignore[no-untyped-call] # torch leaves it untyped
            gradient_UD.split(some) if on_cpu else [gradient_UD],  # type: ignore[no-untyped-call] # the same
            strict=True,
        ):
            w, *states = (tensor.index_select(0, rows) for tensor in tensors)
            self.owner.rule.update(w, gradient, states, plan.hyper, number)
            for tensor, part in zip(tensors, (w, *states), strict=True):
                tensor.index_copy_(0, rows, part)


class _Lookup(torch.autograd.Function):
    """``[bags, D]`` (pooled) or ``[N, D]`` of one block; its backward updates the block."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd calls it by position
        ctx: Any,
        hook: Tensor,
        plan: _Plan,
        rows_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        del hook  # it only makes autograd call the backward pass
        ctx.plan = plan
        ctx.save_for_backward(rows_N, offsets, weights_N)
        bags = BlockBags(rows_N, offsets, weights_N)
        return look_up_rows(plan.block.weight, bags, pooled=plan.pooled, mean=plan.mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        plan: _Plan = ctx.plan
        gradient = gradient.float()
        if plan.clip_to is not None:
            gradient = gradient.clamp(-plan.clip_to, plan.clip_to)
        found = row_gradients(
            plan.block.weight,
            BlockBags(*ctx.saved_tensors),
            gradient,
            pooled=plan.pooled,
            mean=plan.mean,
            of_weights=ctx.needs_input_grad[4],
        )
        # A step without ids here is a step: the shards of a table count alike on all ranks.
        plan.block.count_step(plan)
        if found.rows.numel():
            plan.block.update(plan, found.rows, found.summed)
        return None, None, None, None, found.weights


class RowSparseTables:
    """Tables with one of the optimizers of `tessera.training.optim.row_updates`.

    Args:
        tables: the tables; features come in their order.
        optimizer: which optimizer.
        clip_to: bound on the numbers of the output's gradient.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum; without per-id weights.
        device: where the tables live.

    Attributes:
        weights: per table ``[local_rows, local_cols]`` float32, zeros at first; views.
        states: per table its optimizer states, views.
        step: int64 scalar on the CPU, updates so far.

    Memory: the tables and the states, and while a batch is updated its U rows of both.
    """

    def __init__(
        self,
        tables: Sequence[TableShape],
        *,
        optimizer: EmbOptimType,
        clip_to: float | None,
        pooled: bool,
        mean: bool,
        device: torch.device,
    ) -> None:
        self.rule = RULES[optimizer]
        self._clip_to = clip_to
        self._pooled = pooled
        self._mean = mean
        self.step = torch.zeros((), dtype=torch.int64)
        self._hook = nn.Parameter(torch.zeros(0, device=device))
        self._by_cols = RowBlocks(tables, pooled=pooled, device=device)
        self._blocks = [_Block(self, shape, device) for shape in self._by_cols.blocks]
        self.weights: list[Tensor] = [torch.empty(0)] * len(tables)
        self.states: list[list[Tensor]] = [[] for _ in tables]
        for block in self._blocks:
            for place, view in zip(block.shape.tables, block.split(block.weight), strict=True):
                self.weights[place] = view
            for state in block.states:
                for place, view in zip(block.shape.tables, block.split(state), strict=True):
                    self.states[place].append(view)

    def next_step(self) -> int:
        """Count one more update."""
        self.step += 1
        return int(self.step)

    def look_up(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, hyper: HyperParameters
    ) -> Tensor:
        """Look up; the backward pass of the result updates the tables.

        Args:
            ids: ``[N]`` int64 rows, known to be inside their tables.
            offsets: ``[F * B + 1]`` int64.
            weights: ``[N]`` float32, factors of the ids' vectors; sum pooling only.
            hyper: of this batch.

        Returns:
            ``[B, sum of D]``, or unpooled ``[N, D]``; float32.
        """
        step = _Step()

        def run(number: int, bags: BlockBags) -> Tensor:
            block = self._blocks[number]
            if not torch.is_grad_enabled():
                return look_up_rows(block.weight, bags, pooled=self._pooled, mean=self._mean)
            plan = _Plan(block, hyper, step, self._clip_to, self._pooled, self._mean)
            vectors: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
                self._hook, plan, bags.rows, bags.offsets, bags.weights
            )
            return vectors

        return self._by_cols.look_up(ids, offsets, weights, run)
