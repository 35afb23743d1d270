"""Tables that update the rows of a batch in its backward pass, by plain tensor operations.

For what FBGEMM's operators do not do: most optimizers on a CPU, Lion, rows whose length is not a
multiple of four, weight decay of SGD and Adagrad.

Legend: T tables, F features, N ids, D columns, U distinct rows of a batch.

The tables of one row length lie back to back in one tensor, so that one lookup and one update
serve all of them.  The backward pass is a lookup too: with the N ids sorted, the gradient of a
row is the (weighted) sum of those rows of the output's gradient whose bags hold the id, which
``embedding_bag`` adds up without a temporary ``[N, D]``.  The order of the sums does not depend
on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tessera.training.optim.row_updates import RULES, EmbOptimType, HyperParameters

CPU_BLOCK_BYTES = 1 << 18
"""So many bytes of rows are updated at a time on a CPU: what a rule goes over again and again
stays in a core's own cache."""


class TableShape(Protocol):
    """What a kernel must know of a table."""

    @property
    def local_rows(self) -> int:
        """Rows here."""

    @property
    def local_cols(self) -> int:
        """Columns here."""

    def num_features(self) -> int:
        """How many features look rows up here."""


@dataclass
class _Step:
    """One update of all tables, shared by the backward passes of their blocks."""

    number: int | None = None


@dataclass(frozen=True)
class _Plan:
    """What the backward pass of a lookup does."""

    block: _Block
    hyper: HyperParameters
    step: _Step
    clip_to: float | None
    pooled: bool
    mean: bool


class _Block:
    """Tables of one row length, back to back."""

    def __init__(
        self,
        *,
        owner: RowSparseTables,
        tables: list[int],
        shapes: Sequence[TableShape],
        device: torch.device,
    ) -> None:
        self.owner = owner
        self.tables = tables
        self.cols = shapes[tables[0]].local_cols
        rows = [shapes[table].local_rows for table in tables]
        self.weight = torch.zeros(sum(rows), self.cols, device=device)
        self.states = [
            torch.zeros(sum(rows) if rowwise else (sum(rows), self.cols), device=device)
            for rowwise in owner.rule.rowwise_states
        ]
        self.rows = rows
        first_rows = [sum(rows[:place]) for place in range(len(rows))]
        per_feature = [
            (first_rows[place], index)
            for place, table in enumerate(tables)
            for index in range(shapes[table].num_features())
        ]
        self.first_row_F = torch.tensor(
            [first for first, _ in per_feature], dtype=torch.int64, device=device
        )

    def split(self, tensor: Tensor) -> list[Tensor]:
        return list(torch.split(tensor, self.rows))

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
        some = max(CPU_BLOCK_BYTES // (4 * self.cols), 1)
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
        return _look_up(plan, rows_N, offsets, weights_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        plan: _Plan = ctx.plan
        rows_N, offsets, weights_N = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        if plan.clip_to is not None:
            gradient = gradient.clamp(-plan.clip_to, plan.clip_to)
        source_N, scale_N = _sources(plan, rows_N, offsets, weights_N)
        weights_gradient = None
        if ctx.needs_input_grad[4]:
            vectors = plan.block.weight.detach()[rows_N]
            spread = gradient if source_N is None else gradient[source_N]
            weights_gradient = torch.linalg.vecdot(vectors, spread)
        # A step without ids here is a step: the shards of a table count alike on all ranks.
        plan.block.count_step(plan)
        if rows_N.numel():
            sorted_N, order_N = torch.sort(rows_N, stable=True)
            rows_U, counts_U = torch.unique_consecutive(sorted_N, return_counts=True)
            runs = torch.zeros(counts_U.numel() + 1, dtype=torch.int64, device=rows_N.device)
            torch.cumsum(counts_U, 0, out=runs[1:])
            summed_UD = functional.embedding_bag(
                order_N if source_N is None else source_N[order_N],
                gradient,
                runs,
                mode="sum",
                per_sample_weights=None if scale_N is None else scale_N[order_N],
                include_last_offset=True,
            )
            plan.block.update(plan, rows_U, summed_UD)
        return None, None, None, None, weights_gradient


def _look_up(plan: _Plan, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None) -> Tensor:
    weight = plan.block.weight.detach()
    if not plan.pooled:
        return weight.index_select(0, rows_N)
    return functional.embedding_bag(
        rows_N,
        weight,
        offsets,
        mode="mean" if plan.mean else "sum",
        per_sample_weights=None if weights_N is None else weights_N.detach(),
        include_last_offset=True,
    )


def _sources(
    plan: _Plan, rows_N: Tensor, offsets: Tensor, weights_N: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Per id: the output row that it is part of (None: its own), and its factor there (None: 1)."""
    if not plan.pooled:
        return None, None
    sizes = offsets.diff()
    bags = torch.arange(sizes.numel(), device=offsets.device)
    source_N = torch.repeat_interleave(bags, sizes, output_size=rows_N.numel())
    if not plan.mean:
        return source_N, weights_N
    return source_N, sizes.to(torch.float32).reciprocal()[source_N]


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
        by_cols: dict[int, list[int]] = {}
        for index, table in enumerate(tables):
            by_cols.setdefault(table.local_cols, []).append(index)
        self._blocks = [
            _Block(owner=self, tables=members, shapes=tables, device=device)
            for members in by_cols.values()
        ]
        self._features = _features_of_blocks(tables, [block.tables for block in self._blocks])
        self.weights: list[Tensor] = [torch.empty(0)] * len(tables)
        self.states: list[list[Tensor]] = [[] for _ in tables]
        for block in self._blocks:
            for place, view in zip(block.tables, block.split(block.weight), strict=True):
                self.weights[place] = view
            for state in block.states:
                for place, view in zip(block.tables, block.split(state), strict=True):
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
        features = self._features
        batch_size = (offsets.numel() - 1) // features.count
        whole = _Bags(ids, offsets, weights, batch_size)
        step = _Step()
        parts: dict[int, Tensor] = {}
        for block, members in zip(self._blocks, features.of_block, strict=True):
            own = _select(whole, members, features.count)
            plan = _Plan(block, hyper, step, self._clip_to, self._pooled, self._mean)
            vectors = self._run(plan, own)
            if len(self._blocks) == 1:
                return self._laid_out(vectors, len(members), batch_size, block.cols)
            cut = vectors.view(len(members), batch_size, block.cols)
            parts.update(zip(members, cut.unbind(0), strict=True))
        return torch.cat([parts[feature] for feature in range(features.count)], dim=1)

    def _run(self, plan: _Plan, own: _Bags) -> Tensor:
        # A bag's first id stands at offsets[bag]; a feature's bounds are those of its bags.
        per_feature = own.offsets[:: max(own.batch_size, 1)][: plan.block.first_row_F.numel() + 1]
        if own.batch_size == 0:
            per_feature = own.offsets.new_zeros(plan.block.first_row_F.numel() + 1)
        first_N = torch.repeat_interleave(
            plan.block.first_row_F, per_feature.diff(), output_size=own.ids.numel()
        )
        rows_N = own.ids + first_N
        if not torch.is_grad_enabled():
            return _look_up(plan, rows_N, own.offsets, own.weights)
        vectors: Tensor = _Lookup.apply(self._hook, plan, rows_N, own.offsets, own.weights)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return vectors

    def _laid_out(self, vectors: Tensor, features: int, batch_size: int, cols: int) -> Tensor:
        if not self._pooled or features == 1:
            return vectors
        by_sample = vectors.view(features, batch_size, cols).transpose(0, 1)
        return by_sample.reshape(batch_size, features * cols)


@dataclass(frozen=True)
class _Features:
    count: int
    of_block: list[list[int]]


def _features_of_blocks(tables: Sequence[TableShape], blocks: list[list[int]]) -> _Features:
    of_table: list[list[int]] = []
    count = 0
    for table in tables:
        of_table.append(list(range(count, count + table.num_features())))
        count += table.num_features()
    return _Features(count, [[f for table in block for f in of_table[table]] for block in blocks])


@dataclass(frozen=True)
class _Bags:
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    batch_size: int


def _select(whole: _Bags, members: list[int], features: int) -> _Bags:
    """The ids and bags of some features, in their order."""
    if len(members) == features:
        return whole
    batch_size, offsets = whole.batch_size, whole.offsets
    bounds = offsets[::batch_size].tolist() if batch_size else [0] * (features + 1)
    spans = [slice(bounds[feature], bounds[feature + 1]) for feature in members]
    sizes_FB = offsets.diff().view(features, batch_size)
    sizes = sizes_FB[torch.tensor(members, device=offsets.device)].flatten()
    return _Bags(
        torch.cat([whole.ids[span] for span in spans]),
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        None if whole.weights is None else torch.cat([whole.weights[span] for span in spans]),
        batch_size,
    )
