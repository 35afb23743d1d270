"""Tables of one row length back to back, so that one lookup serves all of them.

Legend: F features, N ids, D columns, U distinct rows of a batch.

The backward pass is a lookup too: with the N ids sorted, the gradient of a row is the (weighted)
sum of those rows of the output's gradient whose bags hold the id, which ``embedding_bag`` adds up
without a temporary ``[N, D]``.  The order of the sums does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class TableShape(Protocol):
    """Describes what a kernel must know of a table."""

    @property
    def local_rows(self) -> int:
        """Return the number of rows on this rank."""

    @property
    def local_cols(self) -> int:
        """Return the number of columns on this rank."""

    def num_features(self) -> int:
        """Return how many features look up rows on this rank."""


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


@dataclass(frozen=True)
class BlockBags:
    """Holds what is looked up in one block.

    Attributes:
        rows: of the block, ``[N]``.
        offsets: ``[F * B + 1]`` int64.
        weights: factors of the rows, ``[N]``, or None.
    """

    rows: Tensor
    offsets: Tensor
    weights: Tensor | None


class RowBlocks:
    """Holds all tables in blocks, one block per row length.

    Args:
        tables: the tables; features come in their order.
        pooled: pooled bags, else one vector per id, of tables of one row length.
        device: where ids are.

    Attributes:
        blocks: the tables of each row length.
        features: how many there are in all.
    """

    def __init__(self, tables: Sequence[TableShape], *, pooled: bool, device: torch.device) -> None:
        self._pooled = pooled
        by_cols: dict[int, list[int]] = {}
        for index, table in enumerate(tables):
            by_cols.setdefault(table.local_cols, []).append(index)
        first_feature = [0]
        for table in tables:
            first_feature.append(first_feature[-1] + table.num_features())
        self.features = first_feature[-1]
        self.blocks: list[RowBlock] = []
        for cols, members in by_cols.items():
            rows = [tables[index].local_rows for index in members]
            per_feature = [
                (feature, sum(rows[:place]))
                for place, index in enumerate(members)
                for feature in range(first_feature[index], first_feature[index + 1])
            ]
            first_row_F = torch.tensor(
                [first for _, first in per_feature], dtype=torch.int64, device=device
            )
            features = [feature for feature, _ in per_feature]
            self.blocks.append(RowBlock(members, rows, cols, features, first_row_F))

    def look_up(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        run: Callable[[int, BlockBags], Tensor],
    ) -> Tensor:
        """Look up the vectors of all features, block by block.

        Args:
            ids: ``[N]`` int64 rows, known to be inside their tables.
            offsets: ``[F * B + 1]`` int64.
            weights: ``[N]`` factors of the ids' vectors; sum pooling only.
            run: the lookup in the block of that number: ``[F * B, D]``, or unpooled ``[N, D]``.

        Returns:
            ``[B, sum of D]``, or unpooled ``[N, D]``.
        """
        batch_size = (offsets.numel() - 1) // self.features
        parts: dict[int, Tensor] = {}
        for number, block in enumerate(self.blocks):
            own_ids, own_offsets, own_weights = self._select(
                block.features, ids, offsets, weights, batch_size
            )
            # A bag's first id stands at offsets[bag]; a feature's bounds are those of its bags.
            bounds = own_offsets[:: max(batch_size, 1)][: len(block.features) + 1]
            if batch_size == 0:
                bounds = own_offsets.new_zeros(len(block.features) + 1)
            first_N = torch.repeat_interleave(
                block.first_rows, bounds.diff(), output_size=own_ids.numel()
            )
            vectors = run(number, BlockBags(own_ids + first_N, own_offsets, own_weights))
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

    def _select(
        self,
        members: list[int],
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch_size: int,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The ids and bags of some features, in their order."""
        if len(members) == self.features:
            return ids, offsets, weights
        bounds = offsets[::batch_size].tolist() if batch_size else [0] * (self.features + 1)
        spans = [slice(bounds[feature], bounds[feature + 1]) for feature in members]
        sizes_FB = offsets.diff().view(self.features, batch_size)
        sizes = sizes_FB[torch.tensor(members, device=offsets.device)].flatten()
        return (
            torch.cat([ids[span] for span in spans]),
            torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
            None if weights is None else torch.cat([weights[span] for span in spans]),
        )


def look_up_rows(weight: Tensor, bags: BlockBags, *, pooled: bool, mean: bool) -> Tensor:
    """``[bags, D]``, or unpooled ``[N, D]``; autograd sees nothing of it.

    Args:
        weight: the block's ``[rows, D]``.
        bags: what to look up.
        pooled: pooled bags, else one vector per id.
        mean: mean pooling instead of sum.
    """
    weight = weight.detach()
    if not pooled:
        return weight.index_select(0, bags.rows)
    factors = None if bags.weights is None else bags.weights.detach().to(weight.dtype)
    return functional.embedding_bag(
        bags.rows,
        weight,
        bags.offsets,
        mode="mean" if mean else "sum",
        per_sample_weights=factors,
        include_last_offset=True,
    )


@dataclass(frozen=True)
class RowGradients:
    """Holds what the backward pass of a lookup computes.

    Attributes:
        rows: the rows, ascending, ``[U]``.
        summed: their gradients, ``[U, D]`` float32.
        weights: the gradients of the ids' factors; None: nobody asked.
    """

    rows: Tensor
    summed: Tensor
    weights: Tensor | None


def row_gradients(
    weight: Tensor,
    bags: BlockBags,
    gradient: Tensor,
    *,
    pooled: bool,
    mean: bool,
    of_weights: bool,
) -> RowGradients:
    """Compute the gradients of the rows of a lookup.

    Args:
        weight: the block's ``[rows, D]``.
        bags: what was looked up.
        gradient: of the lookup's result.
        pooled: as it was looked up.
        mean: as it was looked up.
        of_weights: whether the ids' factors get a gradient.
    """
    gradient = gradient.float().contiguous()
    rows_N = bags.rows
    source_N, scale_N = _sources(bags, pooled=pooled, mean=mean)
    weights_gradient = None
    if of_weights:
        vectors = weight.detach()[rows_N].float()
        spread = gradient if source_N is None else gradient[source_N]
        weights_gradient = torch.linalg.vecdot(vectors, spread)
    if rows_N.numel() == 0:
        return RowGradients(rows_N, gradient.new_zeros(0, weight.size(1)), weights_gradient)
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
    return RowGradients(rows_U, summed_UD, weights_gradient)


def _sources(bags: BlockBags, *, pooled: bool, mean: bool) -> tuple[Tensor | None, Tensor | None]:
    """Per id: the output row that it is part of (None: its own), and its factor there (None: 1)."""
    if not pooled:
        return None, None
    sizes = bags.offsets.diff()
    numbers = torch.arange(sizes.numel(), device=sizes.device)
    source_N = torch.repeat_interleave(numbers, sizes, output_size=bags.rows.numel())
    if not mean:
        return source_N, bags.weights
    return source_N, sizes.to(torch.float32).reciprocal()[source_N]
