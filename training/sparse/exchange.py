"""What sharding asks of a keyed jagged tensor: its tensors to send, and itself from received ones.

Between ranks go the lengths, the ids, the strides of a batch that varies per key, and the
weights, in this order; each rank's keys arrive together, and are put key by key here.
"""

# ruff: noqa: FBT001, PLR0917 - the signature that TorchRec users know

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessera.training.sparse import checks
from tessera.training.sparse.keyed_bags import KeyedBags
from tessera.training.sparse.layout import lengths_to_offsets
from tessera.training.sparse.strictness import is_strict

if TYPE_CHECKING:
    from typing_extensions import Self


def sums_of_splits(numbers: list[int], splits: list[int]) -> list[int]:
    """The sum of each run of ``numbers``; ``splits`` are the runs' lengths."""
    sums = []
    first = 0
    for count in splits:
        sums.append(sum(numbers[first : first + count]))
        first += count
    return sums


def permute_segments(source: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """Segments of ``source``, all of them, in another order.

    Args:
        source: ``[n]`` or ``[n, D]``.
        sizes: ``[s]``, the segments' lengths; they add up to ``n``.
        order: ``[s]`` int32 or int64, a permutation of the segments.
    """
    starts = lengths_to_offsets(sizes)[:-1]
    moved = sizes.index_select(0, order).long()
    new_starts = lengths_to_offsets(moved)[:-1]
    shift = starts.index_select(0, order) - new_starts
    total = source.size(0)
    places = torch.repeat_interleave(shift, moved, output_size=total)
    places += torch.arange(total, device=source.device)
    return source.index_select(0, places)


def permute_each_bag(
    order: Tensor, lengths: Tensor, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bags, all of them, in another order.

    Args:
        order: ``[s]`` int32 or int64, a permutation of the bags.
        lengths: ``[s]``.
        values: ``[n]``.
        weights: ``[n]`` or None.
    """
    if "fbgemm_gpu" in sys.modules:
        # One pass instead of several.
        moved: tuple[Tensor, Tensor, Tensor | None] = torch.ops.fbgemm.permute_1D_sparse_data(
            order.int(), lengths, values, weights, values.numel()
        )
        return moved
    return (
        lengths.index_select(0, order),
        permute_segments(values, lengths, order),
        None if weights is None else permute_segments(weights, lengths, order),
    )


def _permute_bags(
    order: Tensor, lengths_SB: Tensor, values: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of bags (``[s, B]`` lengths) in another order, with their ids and weights."""
    if "fbgemm_gpu" in sys.modules and order.dtype == torch.int32:
        # One pass instead of several; FBGEMM is there wherever sharded tables are.
        moved: tuple[Tensor, Tensor, Tensor | None] = torch.ops.fbgemm.permute_2D_sparse_data(
            order, lengths_SB, values, weights, values.numel()
        )
        return moved
    sizes = lengths_SB.sum(dim=1)
    return (
        lengths_SB.index_select(0, order),
        permute_segments(values, sizes, order),
        None if weights is None else permute_segments(weights, sizes, order),
    )


def received(
    keys: int,
    tensors: list[Tensor],
    recat: Tensor | None,
    stride_per_rank: list[int],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lengths, ids and weights key by key, of tensors that lie rank by rank.

    Args:
        keys: ``F``.
        tensors: lengths ``[sum over ranks of F * B_r]``, ids ``[N]``, and weights ``[N]`` or not.
        recat: ``[R * F]`` order of the (rank, key) segments; where batch sizes differ between
            ranks ``[sum of F * B_r]``, the order of the bags; None leaves all as it is.
        stride_per_rank: ``[R]``, ``B_r``.
    """
    lengths, values = tensors[0], tensors[1]
    weights = tensors[2] if len(tensors) > 2 else None
    if recat is None or keys == 0 or lengths.numel() == 0:
        return lengths, values, weights
    stride = stride_per_rank[0]
    width = stride if all(own == stride for own in stride_per_rank) else 1
    lengths, values, weights = _permute_bags(recat, lengths.view(-1, width), values, weights)
    return lengths.flatten(), values, weights


def received_varying(
    keys: int,
    tensors: list[Tensor],
    ranks: int,
    recat: Tensor | None,
    stagger: int,
) -> tuple[Tensor, Tensor, Tensor | None, list[list[int]]]:
    """Like `received` of a batch that varies per key; also ``[F][ranks]`` strides.

    Args:
        keys: ``F``.
        tensors: lengths, ids, ``[R * F]`` strides, and weights or not.
        ranks: ``R``.
        recat: ``[R * F]`` order of the (rank, key) segments, or None.
        stagger: ranks per node where the segments arrive node by node, else 1.
    """
    lengths, values, strides = tensors[0], tensors[1], tensors[2]
    weights = tensors[3] if len(tensors) > 3 else None
    per_key: list[list[int]] = strides.view(ranks, keys).t().tolist()
    if recat is not None and keys > 0:
        bag_bounds = lengths_to_offsets(strides)
        id_bounds = lengths_to_offsets(lengths).index_select(0, bag_bounds)
        sizes = id_bounds[1:] - id_bounds[:-1]
        lengths = permute_segments(lengths, strides, recat)
        values = permute_segments(values, sizes, recat)
        if weights is not None:
            weights = permute_segments(weights, sizes, recat)
    if stagger > 1:
        order = torch.arange(ranks).view(stagger, -1).t().flatten().tolist()
        per_key = [[own[rank] for rank in order] for own in per_key]
    return lengths, values, weights, per_key


class Exchangeable(KeyedBags):
    """Base of `KeyedJaggedTensor`: the methods that move it between ranks and memories."""

    @abstractmethod
    def with_fields(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
    ) -> Self:
        """The same keys and bounds over other tensors; the caller answers for their sizes."""

    def offset_per_key_or_none(self) -> list[int] | None:
        """The bounds of the keys' ids if they are known without work."""
        known = self._offset_per_key is not None or self._length_per_key is not None
        return self.offset_per_key() if known else None

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the number of ids per key if it is known without work, else None."""
        known = self._offset_per_key is not None or self._length_per_key is not None
        return self.length_per_key() if known else None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Keys and ``[F, B]``: the bag of its key that each sample uses.

        Raises:
            ValueError: there are none.
        """
        inverse = self.inverse_indices_or_none()
        if inverse is None:
            raise ValueError("this KeyedJaggedTensor was built without inverse_indices=")
        return inverse

    def unsync(self) -> Self:
        """Forget the per-key bounds; returns itself."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def check_fields(self) -> None:
        """Refuse fields that do not fit each other, as far as the constructor let them in.

        Raises:
            ValueError: weights that are not one per value; after ``strict(False)`` what the constructor
                would have refused.
        """
        checks.check_weights(self._values, self._weights)
        if not is_strict() and not checks.is_traced(self._values, self._lengths, self._offsets):
            strides = self._stride_per_key_per_rank
            fields = self._keys, self._values, self._lengths, self._offsets, self._stride
            checks.check_keyed_jagged(*fields, (strides, None))

    def dist_labels(self) -> list[str]:
        """Return the names of what `dist_tensors` returns."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self.weights_or_none() is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """How many entries of each of `dist_tensors` go to each rank.

        Args:
            key_splits: keys per rank, in order.
        """
        ids = sums_of_splits(self.length_per_key(), key_splits)
        splits = [sums_of_splits(self.stride_per_key(), key_splits), ids]
        if self.variable_stride_per_key():
            splits.append(list(key_splits))
        if self.weights_or_none() is not None:
            splits.append(ids)
        return splits

    def dist_tensors(self) -> list[Tensor]:
        """The tensors to send, on the device of the ids."""
        self.check_fields()
        tensors = [self.lengths(), self.values()]
        if self.variable_stride_per_key():
            strides = torch.tensor(self.stride_per_key(), dtype=torch.int64)
            tensors.append(strides.to(self.values().device, non_blocking=True))
        if (weights := self.weights_or_none()) is not None:
            tensors.append(weights)
        return tensors

    @classmethod
    def dist_init(
        cls,
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
        length_per_key: list[int] | None = None,
    ) -> Self:
        """Build from what arrived: `dist_tensors` of ``num_workers`` ranks, one after the other.

        Args:
            keys: ``F`` names.
            tensors: what `dist_labels` of the senders says.
            variable_stride_per_key: whether strides are among them.
            num_workers: ``R``.
            recat: int32, the order that puts the segments key by key: ``[R * F]``, or one entry
                per bag where ranks differ in a batch size that is one for all keys.
            stride_per_rank: ``[R]`` batch sizes; needed unless the batch varies per key.
            stagger: ranks per node where the segments arrive node by node, else 1.
            length_per_key: ``[F]`` ids, if the ranks told them; else it waits for the device.

        Raises:
            ValueError: ``stride_per_rank`` is missing.
        """
        if variable_stride_per_key:
            lengths, values, weights, strides = received_varying(
                len(keys), tensors, num_workers, recat, stagger
            )
            stride = None
        elif stride_per_rank is None:
            raise ValueError("stride_per_rank is None; only a batch that varies per key has none")
        else:
            lengths, values, weights = received(len(keys), tensors, recat, stride_per_rank)
            stride, strides = sum(stride_per_rank), None
        built = cls(
            keys,
            values,
            weights=weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=strides,
            length_per_key=length_per_key,
            validate=False,
        )
        built.length_per_key()
        built.offset_per_key()
        return built

    def pin_memory(self) -> Self:
        """The same bags in page-locked memory, for fast asynchronous copies to a GPU.

        The bounds of the keys' ids are worked out here, where the lengths can be read at once; the copies
        know them.  Whoever sends ids between ranks would have to wait for the device to learn them.
        """
        if is_strict() and (self._lengths is not None or self._offsets is not None):
            self.offset_per_key()
        fields = self.weights_or_none(), self.lengths_or_none(), self.offsets_or_none()
        weights, lengths, offsets = (
            None if field is None else field.pin_memory() for field in fields
        )
        return self.with_fields(self.values().pin_memory(), weights, lengths, offsets)
