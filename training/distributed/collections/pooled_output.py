"""From the outputs of a pooled collection's shardings to its columns, in the unsharded order.

Legend: ``B`` samples of this rank, ``F`` features, ``S_f`` bags of feature ``f`` (where the batch
varies per feature), ``D`` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from tessera.training.distributed.collections.sharded_collection import (
    CollectionContext,
    VectorsAwaitable,
)
from tessera.training.distributed.comm.column_order import ColumnOrder
from tessera.training.distributed.sharding.interfaces import (
    EmbeddingShardingContext,
    Part,
    blocks_by_name,
)
from tessera.training.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor


class MeanDivisor:
    """Divides the sums of one sharding by the sizes of their bags, where means are wanted.

    Args:
        is_mean: ``[F]``, whether the feature's table is pooled by mean.
        dims: ``[F]`` columns.
        order: of the output's columns; None: that of the features.
    """

    def __init__(
        self, is_mean: Sequence[bool], dims: Sequence[int], order: ColumnOrder | None
    ) -> None:
        self._is_mean, self._dims, self._order = is_mean, list(dims), order

    def factors(self, features: KeyedJaggedTensor) -> Tensor:
        """One over the bags' sizes (1 for features that are sums), in the order of the output.

        Args:
            features: ``F`` features, this rank's own samples.

        Returns:
            ``[B, sum of D]``; ``[sum of S_f x D]`` where the batch varies per feature.
        """
        strides, lengths = features.stride_per_key(), features.lengths()
        each = [whole.split_with_sizes(strides) for whole in (lengths, torch.ones_like(lengths))]
        divisors = torch.cat(
            [
                bags.clamp(min=1) if mean else ones
                for mean, bags, ones in zip(self._is_mean, *each, strict=True)
            ]
        )
        factors = 1.0 / divisors
        if features.variable_stride_per_key():
            return torch.cat(
                [
                    own.repeat_interleave(dim)
                    for own, dim in zip(factors.split_with_sizes(strides), self._dims, strict=True)
                ]
            )
        dims = torch.tensor(self._dims, device=factors.device)
        columns = factors.view(len(self._dims), -1).t()
        whole = columns.repeat_interleave(dims, dim=1, output_size=sum(self._dims))
        return whole if self._order is None else self._order.permute(whole)


class PooledOutput:
    """Puts the outputs of all shardings in the collection's order.

    Args:
        names: the collection's names, in order.
        dims: columns of each.
        parts_per_sharding: what each sharding's columns are, in its order.
        flat_parts_per_sharding: the same of its flat output, where the batch varies per feature.
    """

    def __init__(
        self,
        names: Sequence[str],
        dims: Sequence[int],
        parts_per_sharding: Sequence[Sequence[Part]],
        flat_parts_per_sharding: Sequence[Sequence[Part]] = (),
    ) -> None:
        self._names, self._dims = list(names), list(dims)
        self._parts, self._flat_parts = parts_per_sharding, flat_parts_per_sharding
        # (sharding, place in it) of every part, in the output's order.
        self._order = self._in_order(self._parts)
        self._flat_order = self._in_order(self._flat_parts)
        self._widths, self._pieces = self._runs()

    def _in_order(self, parts_per_sharding: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
        columns = [[part.columns for part in parts] for parts in parts_per_sharding]
        return [
            (block.source, block.place)
            for blocks in blocks_by_name(self._names, columns)
            for block in blocks
        ]

    def _runs(self) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Parts that stay neighbours move as one piece: its width, and where each piece goes."""
        runs = [
            [pair for _, pair in run]
            for _, run in groupby(
                enumerate(self._order), key=lambda item: (item[1][0], item[1][1] - item[0])
            )
        ]
        starts: list[list[tuple[int, int]]] = [[] for _ in self._parts]
        for number, run in enumerate(runs):
            sharding, place = run[0]
            starts[sharding].append((place, number))
        widths: list[list[int]] = []
        piece_of = [(0, 0)] * len(runs)
        for sharding, own in enumerate(starts):
            widths.append([])
            for piece, (_, number) in enumerate(sorted(own)):
                piece_of[number] = (sharding, piece)
                widths[-1].append(
                    sum(self._parts[sharding][place].columns.width for _, place in runs[number])
                )
        return widths, piece_of

    def join(self, outputs: Sequence[Tensor]) -> KeyedTensor:
        """The output of the collection, of ``[B, D]`` of each sharding, in the widest of their dtypes."""
        outputs = _in_one_dtype(outputs)
        if len(self._pieces) == 1:
            values = outputs[0]
        elif len(self._pieces) == len(outputs):
            values = torch.cat([outputs[sharding] for sharding, _ in self._pieces], dim=1)
        else:
            # split, not narrow: its gradient is one concatenation.
            pieces = [
                output.split_with_sizes(widths, dim=1)
                for output, widths in zip(outputs, self._widths, strict=True)
            ]
            values = torch.cat([pieces[sharding][piece] for sharding, piece in self._pieces], dim=1)
        return KeyedTensor(self._names, self._dims, values)

    def join_variable(
        self,
        outputs: Sequence[Tensor],
        strides_per_sharding: Sequence[Sequence[int]],
        inverse_indices: tuple[list[str], Tensor],
    ) -> KeyedTensor:
        """The collection's output where the batch varies per feature.

        Args:
            outputs: per sharding flat, feature by feature ``[S_f x D]``.
            strides_per_sharding: ``S_f`` of each sharding's features.
            inverse_indices: keys, and ``[F, B]`` the bag of its feature that each sample uses.

        Raises:
            KeyError: no inverse indices for a feature.
        """
        keys, bags_FB = inverse_indices
        row_of = {key: row for row, key in enumerate(keys)}
        pieces = []
        for output, parts, strides in zip(
            outputs, self._flat_parts, strides_per_sharding, strict=True
        ):
            widths = [part.columns.width for part in parts]
            flat = output.split_with_sizes([s * w for s, w in zip(strides, widths, strict=True)])
            pieces.append(
                [piece.view(-1, width) for piece, width in zip(flat, widths, strict=True)]
            )
        columns = []
        for sharding, place in self._flat_order:
            feature = self._flat_parts[sharding][place].feature
            if feature not in row_of:
                raise KeyError(f"inverse_indices has no feature {feature!r}; it has {keys}")
            columns.append(pieces[sharding][place].index_select(0, bags_FB[row_of[feature]]))
        return KeyedTensor(self._names, self._dims, torch.cat(columns, dim=1))


def _in_one_dtype(outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in the dtype that their concatenation has.

    A concatenation of pieces that differ would convert each piece by itself, and so would its gradient.
    """
    dtypes = [output.dtype for output in outputs]
    if len(set(dtypes)) <= 1:
        return outputs
    common = reduce(torch.promote_types, dtypes)
    return [output.to(common) for output in outputs]


def construct_output_kt(
    embeddings: list[Tensor], embedding_names: list[str], embedding_dims: list[int]
) -> KeyedTensor:
    """``[B, some columns]`` each side by side, with names and their columns in that order."""
    values = embeddings[0] if len(embeddings) == 1 else torch.cat(embeddings, dim=1)
    return KeyedTensor(embedding_names, embedding_dims, values)


@dataclass
class EmbeddingBagCollectionContext(CollectionContext):
    """Holds what the steps of one batch share.

    Attributes:
        sharding_contexts: one per sharding.
        mean_factors: per sharding, one over the bags' sizes; None where nothing is divided.
        inverse_indices: where the batch varies per feature: keys, and ``[F, B]`` the bag of its
            feature that each sample uses.
        variable_batch_per_feature: whether it does.
    """

    sharding_contexts: list[EmbeddingShardingContext] = field(default_factory=list)
    mean_factors: list[Tensor | None] = field(default_factory=list)
    inverse_indices: tuple[list[str], Tensor] | None = None
    variable_batch_per_feature: bool = False


class EmbeddingBagCollectionAwaitable(VectorsAwaitable[KeyedTensor]):
    """Waits for the pooled vectors of all shardings and joins them."""
