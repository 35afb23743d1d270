"""Tables of one row length back to back, so that one lookup serves all of them.

Legend: F features, N ids, D columns, U distinct rows of a batch.

The backward pass is a lookup too: with the N ids sorted, the gradient of a row is the (weighted)
sum of those rows of the output's gradient whose bags hold the id, which ``embedding_bag`` adds up
without a temporary ``[N, D]``.  The order of the sums does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tessera.training.distributed.tables.kernels.bags import Bags
from tessera.training.distributed.tables.kernels.interfaces import TableGroup


@dataclass(frozen=True)
class RowBlock:
    """Holds the tables of one row length.

    Attributes:
        tables: their places among all tables.
        rows: of each.
        cols: of all.
        features: the places of their features among all features.
        first_rows: where in the block each feature's table begins, ``[F]`` int64.
    """

    tables: list[int]
    rows: list[int]
    cols: int
    features: list[int]
    first_rows: Tensor


class RowBlocks:
    """Holds all tables in blocks, one block per row length (of unpooled ones there is one).

    Attributes:
        blocks: the tables of each row length.
        features: how many there are in all.
    """

    def __init__(self, group: TableGroup) -> None:
        self._pooled = group.pooled
        table_of_feature = group.table_of_feature
        self.features = len(table_of_feature)
        by_cols: dict[int, list[int]] = {}
        for place, table in enumerate(group.tables):
            by_cols.setdefault(table.local_cols, []).append(place)
        self.blocks: list[RowBlock] = []
        for cols, members in by_cols.items():
            rows = [group.tables[place].local_rows for place in members]
            first_row = dict(zip(members, accumulate(rows, initial=0), strict=False))
            features = [f for f, table in enumerate(table_of_feature) if table in first_row]
            first_row_F = torch.tensor(
                [first_row[table_of_feature[feature]] for feature in features],
                dtype=torch.int64,
                device=group.device,
            )
            self.blocks.append(RowBlock(members, rows, cols, features, first_row_F))

    def per_table(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Per table its rows, views, of one tensor ``[rows, ...]`` per block."""
        found: dict[int, Tensor] = {}
        for block, tensor in zip(self.blocks, tensors, strict=True):
            found.update(zip(block.tables, torch.split(tensor, block.rows), strict=True))
        return [found[place] for place in range(len(found))]

    def look_up(self, bags: Bags, run: Callable[[int, Bags], Tensor]) -> Tensor:
        """Look up the vectors of all features, block by block.

        Args:
            bags: of all features, whose ids are known to be inside their tables.
            run: the lookup in the block of that number, whose rows the bags then hold:
                ``[F * B, D]``, or unpooled ``[N, D]``.

        Returns:
            ``[B, sum of D]``, or unpooled ``[N, D]``.
        """
        batch_size = (bags.offsets.numel() - 1) // self.features
        parts: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            own = self._select(block.features, bags, batch_size)
            first_N = torch.repeat_interleave(
                block.first_rows,
                own.bounds(len(block.features)).diff(),
                output_size=own.ids.numel(),
            )
            vectors = run(number, replace(own, ids=own.ids + first_N))
            if len(self.blocks) == 1:
                return self._laid_out(vectors, batch_size, block.cols)
            cut = vectors.view(len(block.features), batch_size, block.cols)
            parts.update(zip(block.features, cut.unbind(0), strict=True))
        return torch.cat([parts[feature] for feature in range(self.features)], dim=1)

    def _laid_out(self, vectors: Tensor, batch_size: int, cols: int) -> Tensor:
        if not self._pooled or self.features == 1:
            return vectors
        by_sample = vectors.view(self.features, batch_size, cols).transpose(0, 1)
        return by_sample.reshape(batch_size, self.features * cols)

    def _select(self, members: list[int], bags: Bags, batch_size: int) -> Bags:
        """The ids and bags of some features, in their order."""
        if len(members) == self.features:
            return bags
        bounds = bags.bounds(self.features).tolist()
        spans = [slice(bounds[feature], bounds[feature + 1]) for feature in members]
        sizes_FB = bags.offsets.diff().view(self.features, batch_size)
        sizes = sizes_FB[torch.tensor(members, device=sizes_FB.device)].flatten()
        weights = bags.weights
        return Bags(
            torch.cat([bags.ids[span] for span in spans]),
            torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            None if weights is None else torch.cat([weights[span] for span in spans]),
            None,
        )


@dataclass(frozen=True)
class BlockLookup:
    """The lookup in one block, and what its backward pass does.

    Attributes:
        weight: the block's ``[rows, D]``.
        group: how it is looked up.
        update: is given the rows of the batch, ascending ``[U]``, and their gradients ``[U, D]``
            float32, in each backward pass; there may be none.
        clip_to: bound on the numbers of the output's gradient; None: there is none.
    """

    weight: Tensor
    group: TableGroup
    update: Callable[[Tensor, Tensor], None]
    clip_to: float | None = None

    def run(self, hook: Tensor, bags: Bags) -> Tensor:
        """Return ``[bags, D]``, or unpooled ``[N, D]``.

        Args:
            hook: a tensor that requires a gradient; it makes autograd call the backward pass, which
                gives it none.
            bags: their ids are rows of the block.
        """
        if not torch.is_grad_enabled():
            return self.vectors(bags)
        vectors: Tensor = _Lookup.apply(hook, self, bags.ids, bags.offsets, bags.weights)  # type: ignore[no-untyped-call] # torch leaves it untyped
        return vectors

    def vectors(self, bags: Bags) -> Tensor:
        """The same; autograd sees nothing of it."""
        weight = self.weight.detach()
        if not self.group.pooled:
            return weight.index_select(0, bags.ids)
        factors = None if bags.weights is None else bags.weights.detach().to(weight.dtype)
        return functional.embedding_bag(
            bags.ids,
            weight,
            bags.offsets,
            mode="mean" if self.group.mean else "sum",
            per_sample_weights=factors,
            include_last_offset=True,
        )

    def go_back(self, bags: Bags, gradient: Tensor, *, of_weights: bool) -> Tensor | None:
        """Update the rows; the gradient of the bags' weights, if it is wanted."""
        gradient = gradient.float()
        if self.clip_to is not None:
            gradient = gradient.clamp(-self.clip_to, self.clip_to)
        gradient = gradient.contiguous()
        source_N, scale_N = self._sources(bags)
        weights_gradient = None
        if of_weights:
            vectors = self.weight.detach()[bags.ids].float()
            spread = gradient if source_N is None else gradient[source_N]
            weights_gradient = torch.linalg.vecdot(vectors, spread)
        if bags.ids.numel() == 0:
            self.update(bags.ids, gradient.new_zeros(0, self.weight.size(1)))
            return weights_gradient
        sorted_N, order_N = torch.sort(bags.ids, stable=True)
        rows_U, counts_U = torch.unique_consecutive(sorted_N, return_counts=True)
        runs = torch.zeros(counts_U.numel() + 1, dtype=torch.int64, device=rows_U.device)
        torch.cumsum(counts_U, 0, out=runs[1:])
        summed_UD = functional.embedding_bag(
            order_N if source_N is None else source_N[order_N],
            gradient,
            runs,
            mode="sum",
            per_sample_weights=None if scale_N is None else scale_N[order_N],
            include_last_offset=True,
        )
        self.update(rows_U, summed_UD)
        return weights_gradient

    def _sources(self, bags: Bags) -> tuple[Tensor | None, Tensor | None]:
        """Per id: the output row that it is part of (None: its own), and its factor (None: 1)."""
        if not self.group.pooled:
            return None, None
        sizes = bags.offsets.diff()
        numbers = torch.arange(sizes.numel(), device=sizes.device)
        source_N = torch.repeat_interleave(numbers, sizes, output_size=bags.ids.numel())
        if not self.group.mean:
            return source_N, bags.weights
        return source_N, sizes.to(torch.float32).reciprocal()[source_N]


class _Lookup(Function):
    """`BlockLookup` as a step of autograd."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd calls it by position
        ctx: Any,
        hook: Tensor,
        lookup: BlockLookup,
        rows_N: Tensor,
        offsets: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        del hook
        ctx.lookup = lookup
        ctx.save_for_backward(rows_N, offsets, weights_N)
        return lookup.vectors(Bags(rows_N, offsets, weights_N, None))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        rows_N, offsets, weights_N = ctx.saved_tensors
        bags = Bags(rows_N, offsets, weights_N, None)
        of_weights = ctx.lookup.go_back(bags, gradient, of_weights=ctx.needs_input_grad[4])
        return None, None, None, None, of_weights
